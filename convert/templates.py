"""Text from the templates that lie beside the code: model cards, report pages, docs/MODELS.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_ESCAPED = (".html.jinja", ".svg.jinja")


def render(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """The text of a template, given by its path below convert/.

    In HTML and SVG every value is escaped unless it is `Markup`; Markdown escapes by `filters`.
    A name that the template uses and nobody gives is a jinja2.UndefinedError.
    """
    return _environment(tuple(filters.items())).get_template(template).render(**values)


@cache
def _environment(filters: tuple[tuple[str, Callable[..., Any]], ...]) -> Environment:
    environment = Environment(
        loader=PackageLoader("mlxconv", "convert"),
        autoescape=lambda name: name is not None and name.endswith(_ESCAPED),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment
