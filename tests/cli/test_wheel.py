"""What users install is the wheel, not this source tree: build it, install it elsewhere, and use it there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from models import tiny_model, tiny_tokenizer

from acgpt import LanguageModel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, run with nothing on PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # Python decodes its output as UTF-8 here whatever the locale; a wide terminal keeps help texts unwrapped.
    env |= {"PYTHONUTF8": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds the wheel, and borrows everything else."""

    root: Path
    empty: Path  # a working directory with nothing in it, so that nothing is imported from there

    @property
    def bin(self) -> Path:
        return self.root / ("Scripts" if os.name == "nt" else "bin")

    def python(self, code: str) -> str:
        return run(self.bin / "python", "-c", code, cwd=self.empty).strip()

    def acgpt(self, *arguments: str) -> str:
        return run(self.bin / "acgpt", *arguments, cwd=self.empty)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree. hatchling writes nothing beside its sources, so the tree needs no copying."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment with the wheel in it.

    Installing torch again would take minutes, so the dependencies are borrowed: a .pth file appends the site-packages
    of the running interpreter to sys.path. Two things keep its development install of acgpt out. Python reads no .pth
    file in a folder that was added by one, so an editable install there does nothing; and the borrowed folders come
    after the environment's own, so a regular install there is never reached. The borrowing starts after pip is done:
    else pip would find acgpt "already installed".
    """
    base = tmp_path_factory.mktemp("installed")
    environment = Environment(base / "venv", base / "empty")
    environment.empty.mkdir()
    venv.create(environment.root, symlinks=os.name != "nt")
    run(
        *PIP, "--python", environment.bin / "python", "install", "--no-deps", "--no-index", wheel, cwd=environment.empty
    )
    own = Path(environment.python("import sysconfig; print(sysconfig.get_path('purelib'))"))
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return environment


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("acgpt/")}
    files = (ROOT / "src" / "acgpt").rglob("*")
    kinds = (".py", ".yaml", ".json", ".html", ".css", ".md")
    sources = {path.relative_to(ROOT / "src").as_posix() for path in files if path.suffix in kinds}
    assert sources | {"acgpt/py.typed"} <= package
    assert all(".dist-info/" in name for name in names - package)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not any("__pycache__" in name for name in names)


def test_the_installed_package_is_the_wheels_own(installed: Environment) -> None:
    home = Path(installed.python("import acgpt; print(acgpt.__file__)"))
    assert home.resolve().is_relative_to(installed.root.resolve())
    assert (home.parent / "py.typed").is_file()
    on_path = installed.python("import sys; print('\\n'.join(sys.path))").splitlines()
    assert ROOT / "src" not in [Path(path).resolve() for path in on_path]


def test_the_installed_version_is_the_one_in_its_metadata(installed: Environment, wheel: Path) -> None:
    stated, recorded = installed.python(
        "import acgpt, importlib.metadata as m; print(acgpt.__version__, m.version('acgpt'))"
    ).split()
    assert stated == recorded == wheel.name.split("-")[1]
    assert installed.acgpt("--version").strip() == f"acgpt {stated}"


def test_the_installed_package_answers_a_question(installed: Environment, tmp_path: Path) -> None:
    lm = LanguageModel(tiny_model(vocabulary=324), tiny_tokenizer(bos_token="<bos>", eos_token="<eos>"))
    lm.save_pretrained(tmp_path / "model")
    template = "The {{cat}} sat."
    answer = json.loads(installed.acgpt("score", template, "--model", str(tmp_path / "model"), "--no-future", "--json"))
    assert answer["log_prob"] == pytest.approx(lm.log_prob(template, future=False).log_prob, abs=1e-3)
