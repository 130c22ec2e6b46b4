"""Write the reference pages from the code; run by mkdocs, into its memory, at every build.

Configuration from pydantic, the command line from typer, HTTP from OpenAPI, metrics and errors from
their tables. Nothing here is written by hand twice.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def cell(text: object) -> str:
    """Text that cannot break a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def configuration() -> Iterator[str]:
    """Every setting of `args:`."""
    from mooncake_serve.config import AppConfig

    yield "# Configuration\n\nWhat `args:` of an application may hold. A size is `4GiB`.\n"
    yield from sections(AppConfig, "")


def sections(model: Any, path: str) -> Iterator[str]:
    """A section's table, then its subsections."""
    rows, below = [], []
    for name, field in model.model_fields.items():
        inner = subsection(field.annotation)
        if inner is not None:
            below.append((inner, f"{path}{name}."))
            continue
        rows.append(
            [f"`{path}{name}`", f"`{kind(field)}`", f"`{default(field)}`", field.description or ""]
        )
    if rows:
        yield f"\n## {path.rstrip('.')}\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n"
        yield table(["setting", "type", "default", "meaning"], rows)
    for inner, prefix in below:
        yield from sections(inner, prefix)


def subsection(annotation: Any) -> Any:
    """The section an annotation names, also where it may be None."""
    from pydantic import BaseModel

    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def kind(field: Any) -> str:
    """A field's type, as a person would write it."""
    name = inspect.formatannotation(field.annotation)
    for old, new in (
        ("pydantic.types.", ""),
        ("typing.", ""),
        ("ByteSize", "size"),
        (" | ", " or "),
    ):
        name = name.replace(old, new)
    return name


def default(field: Any) -> str:
    """A field's default; sizes with their unit."""
    from pydantic import ByteSize

    value = field.get_default(call_default_factory=True)
    return value.human_readable(separator="") if isinstance(value, ByteSize) else repr(value)


def command_line() -> Iterator[str]:
    """Every command with its arguments and options."""
    from typer.main import get_command

    from mooncake_serve.cli import app

    yield "# Command line\n"
    yield from commands(get_command(app), "mooncake-serve", 2)


def commands(command: Any, name: str, level: int) -> Iterator[str]:
    """One command, then those below it."""
    yield f"\n{'#' * level} `{name}`\n\n{inspect.cleandoc(command.help or '')}\n\n"
    rows = []
    for parameter in command.params:
        record = getattr(parameter, "help", None) or ""
        names = ", ".join(f"`{opt}`" for opt in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        shown = (
            ""
            if parameter.default in (None, False, ()) or callable(parameter.default)
            else parameter.default
        )
        rows.append([names, record, f"`{shown}`" if shown != "" else ""])
    if rows:
        yield table(["argument or option", "meaning", "default"], rows)
    if command.epilog:
        text = command.epilog.removeprefix("Example: ")
        yield f"\nExample: `{text}`\n"
    for child, inner in sorted(getattr(command, "commands", {}).items()):
        yield from commands(inner, f"{name} {child}", min(level + 1, 4))


def http() -> Iterator[str]:
    """Routes and bodies of the OpenAPI document."""
    from mooncake_serve.api import create_app
    from mooncake_serve.api.gateway import Gateway
    from mooncake_serve.config import ApiConfig

    document = create_app(cast("Gateway", None), ApiConfig()).openapi()
    yield "# HTTP API\n\nOpenAI's paths, fields and errors. "
    yield "A field that is not implemented is refused by name.\n"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"\n## `{method.upper()} {path}`\n\n"
            yield (
                inspect.cleandoc(operation.get("description") or operation.get("summary") or "")
                + "\n\n"
            )
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            yield body(resolve(schema, document))


def resolve(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """The schema behind a reference into the document's components."""
    target = schema.get("$ref", "").rsplit("/", 1)[-1]
    return document.get("components", {}).get("schemas", {}).get(target, schema)


def body(schema: dict[str, Any]) -> str:
    """A body's fields, or nothing."""
    fields = schema.get("properties", {})
    if not fields:
        return ""
    required = schema.get("required", [])
    rows: list[list[object]] = [
        [
            f"`{name}`",
            f"`{shape(field)}`",
            "required" if name in required else f"`{field.get('default')}`",
            field.get("description", ""),
        ]
        for name, field in fields.items()
    ]
    return table(["field", "type", "default", "meaning"], rows)


def shape(field: dict[str, Any]) -> str:
    """A field's type in a word or two."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(shape(option) for option in field["anyOf"]))
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    if "$ref" in field:
        return field["$ref"].rsplit("/", 1)[-1]
    if field.get("type") == "array":
        return f"list of {shape(field.get('items', {}))}"
    return str(field.get("type", field.get("const", "any")))


def metrics() -> Iterator[str]:
    """Every metric."""
    from mooncake_serve.metrics import METRICS
    from mooncake_serve.ray_metrics import scraped_name

    yield "# Metrics\n\nThrough Ray's agent a name has Ray's prefix, and no colon. "
    yield "Replicas add a label `replica`, stores a label `node`.\n\n"
    yield table(
        ["metric", "through Ray", "kind", "labels", "meaning"],
        [
            [
                f"`{m.name}`",
                f"`{scraped_name(m)}`",
                m.kind,
                ", ".join(f"`{label}`" for label in m.labels),
                m.help,
            ]
            for m in METRICS
        ],
    )


def errors() -> Iterator[str]:
    """The tree of errors."""
    from mooncake_serve import errors as tree

    yield "# Errors\n\nAll in `mooncake_serve.errors`. "
    yield "Over HTTP they come in OpenAI's envelope.\n\n"
    rows: list[list[object]] = []
    for name, error in vars(tree).items():
        if isinstance(error, type) and issubclass(error, tree.MooncakeError):
            status = error.status if issubclass(error, tree.RequestError) else ""
            base = cast("type", error.__base__).__name__
            rows.append([f"`{name}`", f"`{base}`", status, inspect.getdoc(error) or ""])
    yield table(["error", "is a", "HTTP status", "meaning"], rows)


def sdk() -> Iterator[str]:
    """The client, by mkdocstrings."""
    yield "# Python SDK\n\n"
    for name in (
        "client.Client",
        "client.AsyncClient",
        "client.types.Completion",
        "store.StoreClient",
    ):
        yield f"::: mooncake_serve.{name}\n\n"


PAGES = {
    "configuration": configuration,
    "cli": command_line,
    "http": http,
    "sdk": sdk,
    "metrics": metrics,
    "errors": errors,
}

for page, write in PAGES.items():
    with mkdocs_gen_files.open(f"reference/{page}.md", "w") as file:
        file.write("".join(write()))
