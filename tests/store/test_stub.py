"""`_store.pyi` says what the extension module has: names, methods, parameters, defaults."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import mooncake_serve
from mooncake_serve import _store

STUB = ast.parse((Path(mooncake_serve.__file__).parent / "_store.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
MODULES = {
    node.target.id
    for node in STUB.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}


def test_the_stub_names_every_export_and_no_other() -> None:
    exported = {name for name in dir(_store) if not name.startswith("_")}
    assert exported == CLASSES.keys() | FUNCTIONS.keys() | MODULES


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_stub_names_every_member(name: str) -> None:
    members = {node.name for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)}
    public = {member for member in vars(getattr(_store, name)) if not member.startswith("_")}
    assert {member for member in members if not member.startswith("_")} == public


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_have_the_parameters_of_the_stub(name: str) -> None:
    compare(FUNCTIONS[name], getattr(_store, name))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_methods_have_the_parameters_of_the_stub(name: str) -> None:
    for node in CLASSES[name].body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        member = inspect.getattr_static(getattr(_store, name), node.name)
        if not inspect.isgetsetdescriptor(member):
            compare(node, getattr(getattr(_store, name), node.name))


def compare(node: ast.FunctionDef, function: object) -> None:
    assert callable(function)
    have = inspect.signature(function)
    arguments = node.args
    names = [argument.arg for argument in arguments.args]
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    assert list(have.parameters) == names + keyword_only, node.name
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameter = have.parameters[argument.arg]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        want = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        assert parameter.default == want, (node.name, argument.arg)
