"""The registry of methods: those of this package and those of installed plugins.

`@register` makes a class a method of acgpt. Recipes, commands, reports, figures and model cards read the registry, so
the file that defines a method is all that is needed to add it:

    @register                                     [project.entry-points."acgpt.methods"]
    class Mine(Method):                           mine = "my_package.mine:Mine"
        name = "mine"

Methods of this package are registered when `acgpt.methods` is imported. Packages with an entry point in the group
`acgpt.methods` are imported once: when all methods are listed, or when one is looked up that is not registered yet.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from importlib.metadata import entry_points
from typing import TypeVar

from acgpt.errors import reason
from acgpt.methods.base import Method

GROUP = "acgpt.methods"
RECIPE_KEYS = {"loss", "target_positions"}  # recipe keys that `training_options` may have
DECLARED = ("name", "title", "description", "abilities", "reads_future")  # attributes that every method must have
M = TypeVar("M", bound=Method)


class Registry(MutableMapping[str, Method]):
    """Methods by name, sorted by their `sort_order`."""

    def __init__(self) -> None:
        self._methods: dict[str, Method] = {}
        self._searched = False
        self._lock = threading.RLock()  # reentrant: a package may look up a method while it is imported

    def __getitem__(self, name: str) -> Method:
        if name not in self._methods:
            self._search()
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        self._search()
        return iter(sorted(self._methods, key=lambda name: (self._methods[name].sort_order, name)))

    def __len__(self) -> int:
        self._search()
        return len(self._methods)

    def __setitem__(self, name: str, method: Method) -> None:
        self._methods[name] = method

    def __delitem__(self, name: str) -> None:
        del self._methods[name]

    def register(self, method: type[M]) -> type[M]:
        """Make a class a method of acgpt: a class decorator.

        Args:
            method: A subclass of `Method` whose constructor needs no arguments.

        Raises:
            TypeError: It is not a subclass, lacks a required attribute or function, or its name does not consist of
                lower-case words and hyphens.
            ValueError: Another method has the same name.
        """
        if not (inspect.isclass(method) and issubclass(method, Method)):
            raise TypeError(f"{reason(repr(method))} is not a subclass of acgpt.methods.Method")
        missing = [name for name in DECLARED if not hasattr(method, name)] + sorted(method.__abstractmethods__)
        if missing:
            raise TypeError(f"{method.__qualname__} lacks {', '.join(missing)}")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", method.name):
            raise TypeError(f"the name of a method must be lower-case words joined by hyphens, not {method.name!r}")
        if unknown := sorted(method.training_options.keys() - RECIPE_KEYS):
            raise TypeError(f"training_options has the key {unknown[0]}; allowed are {', '.join(sorted(RECIPE_KEYS))}")
        other = self._methods.get(method.name)
        if other is not None and origin(type(other)) != origin(method):
            raise ValueError(f"the name {method.name} is taken by {'.'.join(origin(type(other)))}")
        self._methods[method.name] = method()
        return method

    def _search(self) -> None:
        """Import the packages that add methods, once. Skip one that fails, with a warning."""
        with self._lock:
            if self._searched:
                return
            self._searched = True
            for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
                before = dict(self._methods)
                try:
                    self.register(entry.load())
                except (Exception, SystemExit) as error:
                    self._methods = before
                    package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
                    warnings.warn(
                        f"the method {entry.name}{package} is left out: {reason(error)}. Update the package, or "
                        "uninstall it.",
                        stacklevel=3,
                    )


def origin(method: type[Method]) -> tuple[str, str]:
    """Return the module and the name of a class, which stay the same if the module is loaded again."""
    return method.__module__, method.__qualname__


METHODS = Registry()
register = METHODS.register
