"""The names of a code base, room by room, for who proposes renames.

    python inventory.py ROOT OUTDIR             # a text file for each folder under src/camscope
    python inventory.py ROOT OUTDIR --locals    # and its functions' parameters and locals that are in the banned list
    options: --words FILE (default renaming/words.py), --all (with --locals: every local, not only banned ones)
"""

import argparse
import ast
import collections
import pathlib
import re

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def banned(path):
    """The words of `IDENTIFIERS` in words.py, without running it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "IDENTIFIERS":
            call = node.value  # """…""".split()
            return set(call.func.value.value.split())
    raise SystemExit(f"{path} has no IDENTIFIERS")


def module_of(path):
    parts = list(path.with_suffix("").parts)
    parts = parts[1:] if parts[0] in ("src", "tests") else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importers(root, trees):
    """module -> the files that import it, or a name from it."""
    names = {module_of(p) for p in trees}
    found = collections.defaultdict(set)
    for path, tree in trees.items():
        own = module_of(path)
        package = own if path.name == "__init__.py" else own.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in names else base for a in node.names]
            else:
                continue
            for target in targets:
                if target in names and target != own:
                    found[target].add(path)
    return found


def short(node, limit=100):
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def signature(node):
    text = f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    return " ".join(text.split())


def first_line(node):
    text = ast.get_docstring(node) or ""
    return text.split("\n")[0][:150]


def plain(body):
    """Statements of a body, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from plain(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from plain(handler.body)


def describe(tree, mark):
    for node in plain(tree.body):
        if isinstance(node, FUNCTIONS):
            yield f"  def {mark(node.name)}{signature(node)}"
            if doc := first_line(node):
                yield f"        # {doc}"
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
            extra = "".join(f"@{short(d, 60)} " for d in node.decorator_list)
            yield f"  {extra}class {mark(node.name)}({bases})" + (f"   # {first_line(node)}" if first_line(node) else "")
            yield from members(node, mark)
        elif isinstance(node, ast.Assign):
            names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            if names and names != ["__all__"]:
                yield f"  {', '.join(map(mark, names))} = {short(node.value)}"
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"  {mark(node.target.id)}: {short(node.annotation)}" + (f" = {short(node.value)}" if node.value else "")


def members(cls, mark):
    declared = set()
    for node in plain(cls.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.add(node.target.id)
            yield f"      {mark(node.target.id)}: {short(node.annotation, 70)}" + (f" = {short(node.value, 50)}" if node.value else "")
        elif isinstance(node, ast.Assign):
            names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            declared.update(names)
            yield f"      {', '.join(map(mark, names))} = {short(node.value, 70)}"
        elif isinstance(node, ast.ClassDef):
            yield f"      class {mark(node.name)}({', '.join(map(ast.unparse, node.bases))})"
    for node in plain(cls.body):
        if isinstance(node, FUNCTIONS):
            own = node.args.args[0].arg if node.args.args else None
            for n in ast.walk(node):
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name) and n.value.id == own:
                    if n.attr not in declared:
                        declared.add(n.attr)
                        yield f"      self.{mark(n.attr)}   # set in {node.name}"
    for node in plain(cls.body):
        if isinstance(node, FUNCTIONS):
            kinds = [d for d in map(ast.unparse, node.decorator_list) if d.split(".")[-1] in ("property", "classmethod", "staticmethod", "abstractmethod", "cached_property", "override", "setter")]
            yield f"      {''.join(f'@{k} ' for k in kinds)}def {mark(node.name)}{signature(node)}"
            if doc := first_line(node):
                yield f"            # {doc}"


def local_names(node):
    """(parameters, locals) of a function, with the line where each is bound first; nested functions are for themselves."""
    a = node.args
    parameters = {arg.arg: arg.lineno for arg in [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg] if arg}
    own = {}

    def visit(n):
        if isinstance(n, (*FUNCTIONS, ast.ClassDef)):
            own.setdefault(n.name, n.lineno)
            return
        if isinstance(n, ast.Lambda):
            for arg in [*n.args.posonlyargs, *n.args.args, n.args.vararg, *n.args.kwonlyargs, n.args.kwarg]:
                if arg:
                    own.setdefault(arg.arg, n.lineno)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            own.setdefault(n.id, n.lineno)
        if isinstance(n, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and n.name:
            own.setdefault(n.name, n.lineno)
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            for alias in n.names:
                if alias.asname:
                    own.setdefault(alias.asname, n.lineno)
        for child in ast.iter_child_nodes(n):
            visit(child)

    for n in node.body:
        visit(n)
    return parameters, {k: v for k, v in own.items() if k not in parameters}


def functions(tree, up=()):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield ".".join((*up, node.name)), node
            yield from functions(node, (*up, node.name))
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, (*up, node.name))
        else:
            yield from functions(node, up)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("outdir", type=pathlib.Path)
    parser.add_argument("--locals", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--words", type=pathlib.Path, default=pathlib.Path("renaming/words.py"))
    options = parser.parse_args()
    root, words = options.root.resolve(), banned(options.words)
    mark = lambda name: f"{name}{'(!)' if name.lstrip('_') in words else ''}"  # noqa: E731
    trees = {}
    for folder in ("src", "tests", "benchmarks", "examples", "assets"):
        for path in sorted((root / folder).rglob("*.py")):
            trees[path.relative_to(root)] = ast.parse(path.read_text())
    used = importers(root, trees)
    rooms = collections.defaultdict(list)
    for path in trees:
        if path.parts[0] == "src":
            rooms[path.parent].append(path)
    options.outdir.mkdir(parents=True, exist_ok=True)
    for room, paths in sorted(rooms.items()):
        name = module_of(room / "__init__.py").replace(".", "-")
        lines = [f"# {room}: {len(paths)} modules. (!): in the banned list.", ""]
        marked = 0
        for path in paths:
            by = used[module_of(path)]
            src = sum(p.parts[0] == "src" for p in by)
            lines += [f"## {path}   imported by {src} modules of src, {len(by) - src} others", f"  {first_line(trees[path])}"]
            text = list(describe(trees[path], mark))
            marked += sum(line.count("(!)") for line in text)
            lines += [*text, ""]
        (options.outdir / f"{name}.txt").write_text("\n".join(lines))
        count = 0
        if options.locals:
            lines = [f"# {room}: parameters and locals{'' if options.all else ' in the banned list'}; each as a symbol for rename.py", ""]
            for path in paths:
                part = []
                for qual, node in functions(trees[path]):
                    parameters, own = local_names(node)
                    chosen = lambda n: options.all or n.lstrip("_") in words  # noqa: E731
                    for kind, names in (("parameter", parameters), ("local", own)):
                        for n, line in names.items():
                            if chosen(n) and n not in ("self", "cls", "_"):
                                uses = sum(isinstance(x, ast.Name) and x.id == n for x in ast.walk(node))
                                part.append(f"  {f'{qual}({n})' if kind == 'parameter' else f'{qual}.{n}'}   # {path.name}:{line}, {uses} uses: {trimmed(root, path, line)}")
                if part:
                    lines += [f"## {path}", *part, ""]
                    count += len(part)
            (options.outdir / f"{name}.locals.txt").write_text("\n".join(lines))
        print(f"{name}: {len(paths)} modules, {marked} banned names{f', {count} parameters and locals' if options.locals else ''}")


_TEXT = {}


def trimmed(root, path, line):
    if path not in _TEXT:
        _TEXT[path] = (root / path).read_text().splitlines()
    return re.sub(r"\s+", " ", _TEXT[path][line - 1].strip())[:90]


if __name__ == "__main__":
    main()
