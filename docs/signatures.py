"""Show functions in the docs with the parameters that `@asks` and `@keywords` add, which the source does not show."""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Take signature and docstring of such functions from the imported function."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace what was read from the source."""
        if not any(str(each.value).startswith(("asks(", "keywords(")) for each in func.decorators):
            return
        found = griffe.dynamic_import(func.path)
        signature = inspect.signature(found)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    name,
                    annotation=None if each.annotation is each.empty else str(each.annotation),
                    kind=griffe.ParameterKind[each.kind.name.lower()],
                    default=None if each.default is each.empty else shown(each.default),
                )
                for name, each in signature.parameters.items()
            )
        )
        func.returns = str(signature.return_annotation)
        if func.docstring is not None:
            func.docstring.value = inspect.getdoc(found) or ""


def shown(value: Any) -> str:
    """Return a default as text."""
    return getattr(value, "__name__", repr(value))
