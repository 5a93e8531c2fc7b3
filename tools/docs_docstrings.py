"""What docstrings of this repository are to the reference: Markdown, with sections that Griffe knows.

Parameters and fields stand in columns, `name   text`; literal blocks follow `::`; `Raises` is a sentence. A
public name in backticks is a link to its place in the reference.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

PUBLIC = ("", ".samples", ".checkpoint", ".distributed")  # of penstock: the packages whose __all__ is public
ITEM = re.compile(r"(?P<names>[*\w]+(?:, [*\w]+)*) {2,}(?P<text>\S.*)")
SPECIAL = re.compile(r"(`+)[^`]+\1")


class Docstrings(griffe.Extension):
    """Griffe's extension: runs once the package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        public = public_names(pkg)
        for obj in walk(pkg):
            if obj.docstring is not None:
                section = "Args" if obj.is_function else "Attributes" if obj.is_class else None
                links = {name: place for name, place in public.items() if place != obj.path}
                obj.docstring.value = to_markdown(obj.docstring.value, section, links)
            if isinstance(obj, griffe.Attribute):
                obj.annotation = spelled_out(obj.annotation, pkg)
            if isinstance(obj, griffe.Function):
                for parameter in obj.parameters:
                    annotation = spelled_out(parameter.annotation, pkg)
                    quoted = isinstance(annotation, str)
                    parameter.annotation = annotation.strip("\"'") if quoted else annotation
                    parameter.default = spelled_out(parameter.default, pkg)


def walk(obj: griffe.Object) -> list[griffe.Object]:
    """`obj` and everything that is defined in it."""
    found = [obj]
    for member in obj.members.values():
        if not member.is_alias:
            found += walk(member)  # type: ignore[arg-type]
    return found


def spelled_out(expression: str | griffe.Expr | None, pkg: griffe.Module) -> str | griffe.Expr | None:
    """An annotation or a default, with what a name of the module stands for in the place of the name."""
    if isinstance(expression, griffe.ExprName):
        path = expression.canonical_path.removeprefix(f"{pkg.name}.").split(".")
        try:
            found = pkg[tuple(path)]
            found = found.final_target if found.is_alias else found  # type: ignore[union-attr]
        except (KeyError, griffe.AliasResolutionError):  # of another package
            return expression
        value = found.value if found.is_attribute and found.value else expression
        return (
            spelled_out(value, pkg) if isinstance(value, griffe.Expr) and value is not expression else value
        )
    if isinstance(expression, griffe.ExprBinOp):
        sides = (spelled_out(expression.left, pkg), spelled_out(expression.right, pkg))
        return griffe.ExprBinOp(sides[0] or "", expression.operator, sides[1] or "")
    if isinstance(expression, griffe.ExprSubscript):
        return griffe.ExprSubscript(expression.left, spelled_out(expression.slice, pkg) or "")
    return expression


def public_names(pkg: griffe.Module) -> dict[str, str]:
    """From what a docstring calls a public thing to its place in the reference."""
    found: dict[str, str] = {}
    for package in PUBLIC:
        module = pkg[package.lstrip(".")] if package else pkg
        for name in module.exports or ():
            path = f"penstock{package}.{name}"
            found.setdefault(str(name), path)
            found[path] = path
            target = module.members[str(name)]
            target = target.final_target if target.is_alias else target  # type: ignore[union-attr]
            if target.is_class:
                for member, value in target.members.items():
                    if value.is_function and value.docstring and not member.startswith("_"):
                        found[f"{name}.{member}"] = f"{path}.{member}"
    return found


def to_markdown(text: str, section: str | None, public: dict[str, str]) -> str:
    """A docstring as Markdown in Google's style.

    section   what the things in columns are: parameters ("Args") or fields ("Attributes")
    """
    parts = []
    literal = False
    for block in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")):
        if literal and block.startswith("    "):
            parts[-1] += "\n\n" + block
            continue
        if literal:
            parts[-1] = fenced(parts[-1])
        literal = block.rstrip().endswith("::")
        lines = block.split("\n")
        if literal:
            if said := block.rstrip()[:-2].rstrip():
                parts.append(linked(said, public) + ":")
            parts.append("")
        elif any(ITEM.fullmatch(line.strip()) for line in lines[:2]):
            parts += columns(lines, section, public)
        else:
            parts.append(linked(block, public))
    if literal:
        parts[-1] = fenced(parts[-1])
    return "\n\n".join(parts)


def fenced(block: str) -> str:
    lines = block.strip("\n").split("\n")
    cut = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(line[cut:] for line in lines)
    try:
        ast.parse(code)
        language = "python"
    except SyntaxError:
        language = "text"
    return f"```{language}\n{code}\n```"


def columns(lines: list[str], section: str | None, public: dict[str, str]) -> list[str]:
    """A block of things in columns, each name with its text; groups of them where they have captions."""
    groups: list[tuple[str, list[tuple[str, str]]]] = [("", [])]
    margin = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        item = ITEM.fullmatch(line.strip())
        if item and indent <= margin + 4 and (indent == 0 or groups[-1][0]):
            margin = indent
            if indent == 0 and groups[-1][0]:
                groups.append(("", []))
            groups[-1][1].extend((name, item["text"]) for name in item["names"].split(", "))
        elif indent > margin and groups[-1][1]:
            again = [name for name, text in groups[-1][1] if text == groups[-1][1][-1][1]]
            text = f"{groups[-1][1][-1][1]} {line.strip()}"
            groups[-1] = (groups[-1][0], [(n, text if n in again else t) for n, t in groups[-1][1]])
        else:
            groups.append((line.strip(), []))
            margin = 0
    parts = []
    for caption, items in groups:
        if not items and caption:
            parts.append(linked(caption, public))
        elif items and section:
            body = "\n".join(f"    {name}: {linked(text, public)}" for name, text in items)
            parts.append(f"{section}:{' ' + caption if caption else ''}\n{body}")
        elif items:
            parts.append("\n".join(f"- `{name}`: {linked(text, public)}" for name, text in items))
    return parts


def linked(text: str, public: dict[str, str]) -> str:
    """Text with links for public names: those in backticks, and errors."""

    def link(match: re.Match[str]) -> str:
        name = match[0].strip("`").removesuffix("()")
        return f"[`{match[0].strip('`')}`][{public[name]}]" if name in public else match[0]

    pieces = []
    end = 0
    for match in SPECIAL.finditer(text):
        pieces += [errors(text[end : match.start()], public), link(match)]
        end = match.end()
    return "".join([*pieces, errors(text[end:], public)])


def errors(text: str, public: dict[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        place = public.get(match[0], "")
        return (
            f"[{match[0]}][{place}]" if place.startswith("penstock.") and match[0] != "Report" else match[0]
        )

    return re.sub(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)+\b", link, text)
