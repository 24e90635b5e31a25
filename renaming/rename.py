"""Apply many precise identifier renames over a code base at once, by a language server (basedpyright).

    python rename.py ROOT TABLE.json [--dry] [--strings] [--untyped] [--no-left] [--log FILE]

TABLE.json: a list of rows [path, symbol, new]. See `--help`.
"""

import argparse
import ast
import collections
import html
import io
import json
import keyword
import os
import pathlib
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time
import tokenize
import urllib.parse

HERE = pathlib.Path(__file__).resolve().parent
SERVER = os.environ.get("RENAME_SERVER", str(HERE.parent / "toolenv" / "bin" / "basedpyright-langserver"))
PYTHON = os.environ.get("RENAME_PYTHON", ".venv/bin/python")
FOLDERS = ("src", "tests", "benchmarks", "examples", "assets")
PATCHERS = {"setattr", "delattr", "getattr", "hasattr", "object", "patch", "attrgetter", "methodcaller", "delitem", "setitem"}
COPIES = ("replace", "model_copy", "_replace", "evolve")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# ---------------------------------------------------------------- files and positions


class File:
    """One Python file: text, tree, definitions by qualified name, imports."""

    def __init__(self, root, path):
        self.path, self.absolute = path, root / path
        with self.absolute.open(encoding="utf-8", newline="") as f:
            self.text = f.read()
        self.tree = ast.parse(self.text)
        self.lines = self.text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.defs = collections.defaultdict(list)  # qual -> [(offset, in a comprehension)]
        self.params = set()
        self.classes, self.functions = {}, {}
        self.imports = {}  # (scope, name) -> ("from", module, name) | ("mod", module)
        self.fields = {}  # id of a JoinedStr -> the spans of its {fields}
        self.pieces = set()  # ids of the literal parts of a JoinedStr
        if sys.version_info < (3, 12):
            found = [n for n in ast.walk(self.tree) if type(n) in (ast.FormattedValue, ast.JoinedStr)]
            inner = {id(n.format_spec) for n in found if type(n) is ast.FormattedValue and n.format_spec}
            for node in found:
                if type(node) is ast.JoinedStr and id(node) not in inner:
                    self._mend(node)
        self._collect()

    def _mend(self, joined):
        """Before Python 3.12 what lies in an f-string has wrong positions: set them by the source."""
        begin, end = self.at(joined.lineno, joined.col_offset), self.at(joined.end_lineno, joined.end_col_offset)
        spans, lines = [], [0]
        source = "(" + self.text[begin:end] + ")"
        for line in source.split("\n"):
            lines.append(lines[-1] + len(line) + 1)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.STRING:
                head = re.match(r"(\w*)(\"\"\"|'''|\"|')", token.string)
                if "f" in head[1].lower():
                    start = begin - 1 + lines[token.start[0] - 1] + token.start[1]
                    literals(token.string, head.end(), len(token.string) - len(head[2]), start, spans)
        values = list(flat(joined))
        self.pieces |= {id(n) for n in ast.walk(joined) if isinstance(n, ast.Constant) and n.lineno == joined.lineno and n.col_offset == joined.col_offset}
        self.fields[id(joined)] = [(a, b) for a, _, b in spans]
        if len(values) != len(spans):
            print(f"an f-string is not understood: {self.path}:{joined.lineno}", file=sys.stderr)
            return
        for value, (start, stop, _) in zip(values, spans, strict=True):
            text = self.text[start:stop]
            inner = ast.parse("(" + text + ")", mode="eval").body
            rows = [0]
            for line in ("(" + text).split("\n"):
                rows.append(rows[-1] + len(line) + 1)
            pieces = ("(" + text + ")").split("\n")
            skip = set()
            for to, by in zip(ast.walk(value.value), ast.walk(inner), strict=True):
                if hasattr(by, "lineno") and id(to) not in skip:
                    for row, column in (("lineno", "col_offset"), ("end_lineno", "end_col_offset")):
                        r = getattr(by, row)
                        offset = start - 1 + rows[r - 1] + len(pieces[r - 1].encode()[: getattr(by, column)].decode())
                        line = self.line(offset)
                        setattr(to, row, line)
                        setattr(to, column, len(self.lines[line - 1][: offset - self.starts[line - 1]].encode()))

    def at(self, line, column):
        """Offset of a position of `ast`: lines from 1, columns in bytes."""
        text = self.lines[line - 1]
        return self.starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def of_lsp(self, position):
        line = self.lines[position["line"]]
        column = position["character"]
        if not line.isascii():
            column = len(line.encode("utf-16-le")[: 2 * column].decode("utf-16-le"))
        return self.starts[position["line"]] + column

    def to_lsp(self, offset):
        line = self.line(offset) - 1
        before = self.lines[line][: offset - self.starts[line]]
        return {"line": line, "character": len(before.encode("utf-16-le")) // 2}

    def line(self, offset):
        import bisect

        return bisect.bisect_right(self.starts, offset)

    def word(self, node, name, start=None):
        """Offset of the first token `name` within the node, from an offset on; None without one."""
        begin = self.at(node.lineno, node.col_offset) if start is None else start
        end = self.at(node.end_lineno, node.end_col_offset)
        found = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)").search(self.text, begin, end)
        return found.start() if found else None

    def name_of_def(self, node):
        begin = self.at(node.lineno, node.col_offset)
        return re.compile(r"(?:async\s+)?(?:def|class)\s+").match(self.text, begin).end()

    def attribute(self, node):
        return self.at(node.end_lineno, node.end_col_offset) - len(node.attr)

    def _collect(self):
        self._scope((), self.tree.body, None, None, set())

    def _add(self, qual, offset, inner=False):
        if offset is not None and (offset, inner) not in self.defs[qual]:
            self.defs[qual].append((offset, inner))

    def _scope(self, qual, body, own, members, free):
        for node in body:
            self._visit(node, qual, own, members, free, False)

    def _args(self, node, qual, inner=False):
        a = node.args
        for arg in [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]:
            if arg is not None:
                self._add((*qual, arg.arg), self.at(arg.lineno, arg.col_offset), inner)
                self.params.add((*qual, arg.arg))

    def _visit(self, node, qual, own, members, free, inner):
        again = lambda n, i=inner: self._visit(n, qual, own, members, free, i)  # noqa: E731
        if isinstance(node, FUNCTIONS):
            self._add((*qual, node.name), self.name_of_def(node))
            key = (*qual, node.name)
            self.functions.setdefault(key, []).append(node)
            for n in [*node.decorator_list, *node.args.defaults, *[d for d in node.args.kw_defaults if d]]:
                again(n)
            self._args(node, key)
            names = {n for s in ast.walk(node) if isinstance(s, ast.Global) for n in s.names} if "global " in self.text else set()
            first = [*node.args.posonlyargs, *node.args.args][:1]
            method = qual in self.classes and first
            self._scope(key, node.body, first[0].arg if method else own, qual if method else members, names)
        elif isinstance(node, ast.ClassDef):
            self._add((*qual, node.name), self.name_of_def(node))
            key = (*qual, node.name)
            self.classes[key] = node
            for n in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
                again(n)
            self._scope(key, node.body, None, None, set())
        elif isinstance(node, ast.Lambda):
            self._args(node, qual, True)
            for n in ast.iter_child_nodes(node):
                again(n)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            for n in ast.iter_child_nodes(node):
                again(n, True)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                self._add((node.id,) if node.id in free else (*qual, node.id), self.at(node.lineno, node.col_offset), inner)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and members is not None and isinstance(node.value, ast.Name) and node.value.id == own:
                self._add((*members, node.attr), self.attribute(node))
            again(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                if isinstance(node, ast.ImportFrom):
                    module = self._module(node)
                    self.imports[(qual, name)] = ("from", module, alias.name)
                else:
                    self.imports[(qual, name)] = ("mod", alias.name if alias.asname else name)
                if alias.asname:
                    self._add((*qual, name), self.at(alias.end_lineno, alias.end_col_offset) - len(name))
        else:
            if isinstance(node, ast.ExceptHandler) and node.name:
                start = self.at(node.type.end_lineno, node.type.end_col_offset)
                self._add((*qual, node.name), self.word(node, node.name, start))
            elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
                start = self.at(node.pattern.end_lineno, node.pattern.end_col_offset) if getattr(node, "pattern", None) else None
                self._add((*qual, node.name), self.word(node, node.name, start))
            for n in ast.iter_child_nodes(node):
                again(n)

    def _module(self, node):
        if not node.level:
            return node.module or ""
        parts = module_of(self.path).split(".")
        if not self.path.endswith("__init__.py"):
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


def flat(joined):
    for value in joined.values:
        if isinstance(value, ast.FormattedValue):
            yield value
            if value.format_spec:
                yield from flat(value.format_spec)


def literals(text, at, end, start, spans, inside=False):
    """Add the {fields} of an f-string's text to `spans` as (begin, end of the expression, end); gives where it stopped."""
    while at < end:
        if inside and text[at] == "}":
            return at
        if text[at] == "{" and text[at : at + 2] == "{{" and not inside:
            at += 2
            continue
        if text[at] != "{":
            at += 1
            continue
        begin, depth, quote = at + 1, 0, None
        at += 1
        while at < end:
            c = text[at]
            if quote:
                if text.startswith(quote, at):
                    at += len(quote)
                    quote = None
                    continue
            elif c in "'\"":
                quote = c * 3 if text.startswith(c * 3, at) else c
                at += len(quote)
                continue
            elif c in "([{":
                depth += 1
            elif depth and c in ")]}":
                depth -= 1
            elif not depth and (c in "}:" or (c == "!" and text[at + 1] != "=")):
                break
            at += 1
        stop = at
        debug = re.search(r"(?<![=!<>])=\s*$", text[begin:stop])
        number = len(spans)
        spans.append(None)
        if text[at] == "!":
            at += 2
        if text[at] == ":":
            at = literals(text, at + 1, end, start, spans, True)
        spans[number] = (start + begin, start + (begin + debug.start() if debug else stop), start + at)
        at += 1
    return at


def module_of(path):
    parts = list(pathlib.PurePosixPath(path).with_suffix("").parts)
    if parts[0] in ("src", "tests"):
        parts = parts[1:]
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


class Base:
    """All Python files of a checkout, and what names in them mean, as far as the syntax tells."""

    def __init__(self, root):
        self.root = root
        self.files = {}
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                if "__pycache__" not in path.parts:
                    at = path.relative_to(root).as_posix()
                    self.files[at] = File(root, at)
        self.modules = {module_of(p): p for p in self.files}
        self.keys = collections.defaultdict(set)  # name -> {(path, qual)}
        for path, file in self.files.items():
            for qual in file.defs:
                self.keys[qual[-1]].add((path, qual))
        self.parents, self.children = collections.defaultdict(list), collections.defaultdict(list)
        self.foreign = collections.defaultdict(list)
        for path, file in self.files.items():
            for qual, node in file.classes.items():
                for base in node.bases:
                    kind, *where = self.resolve(file, qual[:-1], base) or ("none",)
                    if kind == "def" and where[1] in self.files[where[0]].classes:
                        self.parents[(path, qual)].append(tuple(where))
                        self.children[tuple(where)].append((path, qual))
                    elif kind == "ext":
                        self.foreign[(path, qual)].append(where[0])

    def resolve(self, file, scope, node):
        """What an expression names: ("def", path, qual), ("mod", path) or ("ext", dotted); None if unknown."""
        if isinstance(node, ast.Subscript):
            return self.resolve(file, scope, node.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            return self.named(file, scope, node.value)
        if isinstance(node, ast.Name):
            return self.named(file, scope, node.id)
        if isinstance(node, ast.Attribute):
            return self.member(self.resolve(file, scope, node.value), node.attr)
        return None

    def named(self, file, scope, name):
        for n in range(len(scope), -1, -1):
            inside = scope[:n]
            if n and inside in file.classes and n != len(scope):
                continue  # a class's names are not seen from its methods
            if (inside, name) in file.imports:
                kind, *what = file.imports[(inside, name)]
                return self.module(what[0]) if kind == "mod" else self.member(self.module(what[0]), what[1])
            if (*inside, name) in file.defs:
                return ("def", file.path, (*inside, name))
        return ("ext", "builtins." + name)

    def module(self, name):
        return ("mod", self.modules[name]) if name in self.modules else ("ext", name)

    def member(self, owner, name, depth=0):
        if owner is None or depth > 12:
            return None
        if owner[0] == "ext":
            return ("ext", f"{owner[1]}.{name}")
        if owner[0] == "mod":
            file = self.files[owner[1]]
            if (name,) in file.defs and ((), name) not in file.imports:
                return ("def", file.path, (name,))
            if ((), name) in file.imports:
                kind, *what = file.imports[((), name)]
                inner = self.module(what[0])
                if kind == "mod":
                    return inner
                return None if inner == owner and what[1] == name else self.member(inner, what[1], depth + 1)
            inner = self.modules.get(f"{module_of(owner[1])}.{name}")
            return ("mod", inner) if inner else None
        if owner[0] == "def":
            _, path, qual = owner
            for where, inside in [(path, qual), *self.above((path, qual))]:
                if (*inside, name) in self.files[where].defs:
                    return ("def", where, (*inside, name))
        return None

    def above(self, key):
        return self._walk(key, self.parents)

    def below(self, key):
        return self._walk(key, self.children)

    @staticmethod
    def _walk(key, links):
        found, todo = [], list(links.get(key, ()))
        while todo:
            if (one := todo.pop(0)) not in found:
                found.append(one)
                todo += links.get(one, ())
        return found

    def members(self, key):
        path, qual = key
        return {q[-1] for q in self.files[path].defs if q[:-1] == qual}

    def has(self, key, name):
        return (*key[1], name) in self.files[key[0]].defs

    def is_protocol(self, key):
        return any(name.endswith(".Protocol") for name in self.foreign.get(key, ()))

    def family(self, key, name):
        """All classes that define the member, above and below a class, and those that satisfy a protocol by its names."""
        found, todo = {}, [(key, "")]
        while todo:
            one, why = todo.pop()
            if one in found:
                continue
            found[one] = why
            todo += [(k, "base") for k in self.above(one) if self.has(k, name)]
            todo += [(k, "override") for k in self.below(one) if self.has(k, name)]
            shared = self.below(one)  # a mixin and a base that meet in one subclass
            for k in shared:
                todo += [(u, "sibling base") for u in self.above(k) if self.has(u, name)]
            if self.is_protocol(one):
                wanted = self.members(one)
                for path, file in self.files.items():
                    for qual in file.classes:
                        k = (path, qual)
                        if k not in found and self.has(k, name):
                            names = set(self.members(k)).union(*(self.members(u) for u in self.above(k)))
                            if wanted <= names:
                                todo.append((k, "protocol"))
            for path, file in self.files.items():  # the protocol that this class satisfies
                for qual in file.classes:
                    k = (path, qual)
                    if k not in found and self.has(k, name) and self.is_protocol(k):
                        names = set(self.members(one)).union(*(self.members(u) for u in self.above(one)))
                        if self.members(k) <= names:
                            todo.append((k, "protocol above"))
        return found


# ---------------------------------------------------------------- scopes: is nothing captured?


def occurrences(tree):
    """Each name of a tree in the order of a walk: (name, number of the scope where it is bound, line, column)."""
    scopes = [dict(kind="module", up=None, bound=set(), out={})]
    seen = []

    def note(name, scope, node):
        seen.append((name, scope, getattr(node, "lineno", 0), getattr(node, "col_offset", 0), type(node) is ast.Name))

    def bind(name, scope, node):
        scopes[scope]["bound"].add(name)
        note(name, scope, node)

    def new(kind, up):
        scopes.append(dict(kind=kind, up=up, bound=set(), out={}))
        return len(scopes) - 1

    def visit(node, s):
        if isinstance(node, FUNCTIONS):
            bind(node.name, s, node)
            for n in [*node.decorator_list, *node.args.defaults, *[d for d in node.args.kw_defaults if d]]:
                visit(n, s)
            inner = new("function", s)
            arguments(node.args, inner, s)
            if node.returns:
                visit(node.returns, s)
            for n in node.body:
                visit(n, inner)
        elif isinstance(node, ast.Lambda):
            for n in [*node.args.defaults, *[d for d in node.args.kw_defaults if d]]:
                visit(n, s)
            inner = new("function", s)
            arguments(node.args, inner, s)
            visit(node.body, inner)
        elif isinstance(node, ast.ClassDef):
            bind(node.name, s, node)
            for n in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
                visit(n, s)
            inner = new("class", s)
            for n in node.body:
                visit(n, inner)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = new("comprehension", s)
            for i, g in enumerate(node.generators):
                visit(g.iter, s if i == 0 else inner)
                visit(g.target, inner)
                for n in g.ifs:
                    visit(n, inner)
            for n in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
                visit(n, inner)
        elif isinstance(node, ast.NamedExpr):
            outer = s
            while scopes[outer]["kind"] == "comprehension":
                outer = scopes[outer]["up"]
            bind(node.target.id, outer, node.target)
            visit(node.value, s)
        elif isinstance(node, ast.Name):
            (note if isinstance(node.ctx, ast.Load) else bind)(node.id, s, node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                bind(alias.asname or alias.name.split(".")[0], s, alias)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                scopes[s]["out"][name] = type(node).__name__
                note(name, s, node)
        else:
            if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
                bind(node.name, s, node)
            if isinstance(node, ast.MatchMapping) and node.rest:
                bind(node.rest, s, node)
            for n in ast.iter_child_nodes(node):
                visit(n, s)

    def arguments(a, inner, outer):
        for arg in [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]:
            if arg is not None:
                bind(arg.arg, inner, arg)
                if arg.annotation:
                    visit(arg.annotation, outer)

    for n in tree.body:
        visit(n, 0)

    def home(name, s):
        if scopes[s]["out"].get(name) == "Global":
            return 0 if name in scopes[0]["bound"] else -1
        first, at = True, s
        while at is not None:
            scope = scopes[at]
            if scopes[at]["out"].get(name) != "Nonlocal" and name in scope["bound"] and (first or scope["kind"] != "class"):
                return at
            first, at = False, scope["up"]
        return -1

    for s in scopes:  # a global statement binds in the module
        scopes[0]["bound"] |= {n for n, kind in s["out"].items() if kind == "Global"}
    return [(name, home(name, s), line, column, plain) for name, s, line, column, plain in seen]


def captured(before, after):
    """Names that mean something else after than before: [(old name, name, line, why)]; and what to complete."""
    pre, post = occurrences(before), occurrences(after)
    if len(pre) != len(post):
        return [("?", "?", 0, "the file's structure changed")], []
    faults, partial, to, back = [], [], {}, {}
    for (a, s, line, column, plain), (b, t, *_) in zip(pre, post, strict=True):
        to.setdefault((s, a), collections.Counter())[(t, b)] += 1
        if a == b and s != t:
            faults.append((a, b, line, "the name is captured" if t != -1 else "the name is left without its definition"))
        elif s != t:
            faults.append((a, b, line, "the new name means something of another scope here"))
    for (s, a), targets in to.items():
        names = {b for _, b in targets}
        if len(names) > 1:
            if len(names) == 2 and a in names:
                new = next(n for n in names if n != a)
                places = [(line, column, plain) for (n, h, line, column, plain), (m, *_) in zip(pre, post, strict=True) if n == a and h == s and m == a]
                if all(plain for *_, plain in places):
                    partial += [(a, new, line, column) for line, column, _ in places]
                    faults = [f for f in faults if not (f[0] == a and f[1] == a)]
                    continue
            faults.append((a, sorted(names - {a})[0], places_of(pre, a, s), f"one name becomes {sorted(names)}"))
        for t, b in targets:
            back.setdefault((t, b), set()).add((s, a))
    for (t, b), sources in back.items():
        if len({a for s, a in sources}) > 1 and t != -1:
            others = sorted({a for s, a in sources if a != b})
            faults.append((others[0], b, places_of(post, b, t), f"{b!r} exists in this scope already"))
    return faults, partial


def places_of(seen, name, scope):
    return next((line for n, s, line, *_ in seen if n == name and s == scope), 0)


# ---------------------------------------------------------------- the language server


class Server:
    """basedpyright over its standard streams."""

    def __init__(self, root, log):
        self.root, self.log = root, log
        self.answers, self.lock, self.ready, self.number = {}, threading.Condition(), threading.Event(), 0
        self.analysis = {
            "extraPaths": [str(root / "src"), str(root / "tests"), str(root)],
            "include": [f for f in FOLDERS if (root / f).exists()],
            "exclude": ["out", ".venv", "**/__pycache__"],
            "diagnosticMode": "openFilesOnly",
            "typeCheckingMode": "off",
            "autoSearchPaths": False,
            "useLibraryCodeForTypes": True,
            "indexing": False,
            "inlayHints": {},
        }
        env = {**os.environ, "NODE_OPTIONS": "--max-old-space-size=5000"}
        self.process = subprocess.Popen(
            [SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=root, env=env
        )
        threading.Thread(target=self._read, daemon=True).start()
        where = self.root.as_uri()
        self.ask("initialize", {
            "processId": os.getpid(), "rootUri": where, "workspaceFolders": [{"uri": where, "name": "root"}],
            "capabilities": {
                "workspace": {"configuration": True, "workspaceFolders": True, "workspaceEdit": {"documentChanges": False}},
                "textDocument": {"rename": {"prepareSupport": True}, "hover": {"contentFormat": ["plaintext"]}},
                "window": {"workDoneProgress": False},
            },
        })  # fmt: skip
        self.tell("initialized", {})
        self.tell("workspace/didChangeConfiguration", {"settings": {}})

    def _send(self, message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        with self.lock:
            self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            self.process.stdin.flush()

    def _read(self):
        out = self.process.stdout
        while True:
            size = 0
            while (line := out.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            if not size:
                if self.process.poll() is not None:
                    break
                continue
            message = json.loads(out.read(size))
            if "method" in message and "id" in message:
                result = None
                if message["method"] == "workspace/configuration":
                    result = [self._setting(i.get("section", "")) for i in message["params"]["items"]]
                elif message["method"] == "workspace/workspaceFolders":
                    result = [{"uri": self.root.as_uri(), "name": "root"}]
                self._send({"id": message["id"], "result": result})
            elif "method" in message:
                if message["method"] == "window/logMessage":
                    text = message["params"]["message"]
                    self.log.write(text + "\n")
                    self.log.flush()
                    if re.search(r"Found \d+ source file", text) or "No source files found" in text:
                        self.ready.set()
            else:
                with self.lock:
                    self.answers[message["id"]] = message
                    self.lock.notify_all()

    def _setting(self, section):
        return {
            "python": {"pythonPath": PYTHON, "analysis": self.analysis},
            "python.analysis": self.analysis, "basedpyright.analysis": self.analysis,
            "basedpyright": {"analysis": self.analysis, "disableLanguageServices": False},
        }.get(section)  # fmt: skip

    def tell(self, method, params):
        self._send({"method": method, "params": params})

    def ask(self, method, params, timeout=900):
        with self.lock:
            self.number += 1
            number = self.number
        self._send({"id": number, "method": method, "params": params})
        with self.lock:
            if not self.lock.wait_for(lambda: number in self.answers or self.process.poll() is not None, timeout):
                raise TimeoutError(method)
            if number not in self.answers:
                raise SystemExit("the language server ended; see the log")
            answer = self.answers.pop(number)
        if "error" in answer:
            raise RuntimeError(answer["error"].get("message"))
        return answer["result"]

    def at(self, file, offset):
        return {"textDocument": {"uri": file.absolute.as_uri()}, "position": file.to_lsp(offset)}

    def open(self, file):
        self.tell("textDocument/didOpen", {"textDocument": {
            "uri": file.absolute.as_uri(), "languageId": "python", "version": 1, "text": file.text}})  # fmt: skip

    def close(self):
        try:
            self.ask("shutdown", None, 10)
            self.tell("exit", None)
            self.process.wait(10)
        except Exception:
            self.process.kill()


# ---------------------------------------------------------------- rows


class Row:
    def __init__(self, number, path, symbol, new):
        self.number, self.path, self.symbol, self.new = number, path, symbol, new
        self.plain, _, line = symbol.partition("@")
        self.only = int(line) if line.isdigit() else None  # name@line: only the definition on this line
        self.old = re.split(r"[.(]", self.plain.rstrip(")"))[-1]
        self.fault, self.keys, self.owners, self.kind = None, {}, {}, "?"
        self.edits = {}  # (path, start, end) -> new
        self.notes = []

    def __str__(self):
        return f"[{self.number}] {self.path} {self.symbol} -> {self.new}"


def locate(base, row):
    """Find what the row names, and its family; sets `row.keys` {(path, qual): why}."""
    match = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", row.plain)
    file = base.files.get(row.path)
    if file is None:
        return "no such file"
    if not match:
        return "the symbol is not understood"
    if not row.new.isidentifier() or keyword.iskeyword(row.new):
        return f"{row.new!r} is no identifier"
    if row.old == row.new:
        return "old and new are the same"
    qual = (*match[1].split("."), *([match[2]] if match[2] else []))
    if qual not in file.defs:
        near = ", ".join(sorted({".".join(q) for q in file.defs if q[-1] == qual[-1]})[:6])
        return f"not found in the file{f'; there are: {near}' if near else ''}"
    if match[2] and qual not in file.params:
        return f"{match[2]} is no parameter of {match[1]}"
    row.keys = {(row.path, qual): ""}
    if row.only is not None and row.only not in {file.line(o) for o, _ in file.defs[qual]}:
        return f"line {row.only} does not define it; lines {sorted({file.line(o) for o, _ in file.defs[qual]})} do"
    up = qual[:-1]
    if up in file.classes:
        row.kind = "member"
        if row.old.startswith("__") and row.old.endswith("__"):
            return "a method that Python itself calls"
        row.owners = base.family((row.path, up), row.old)
        row.keys = {(p, (*q, row.old)): why for (p, q), why in row.owners.items()}
    elif qual in file.params and up[:-1] in file.classes:
        row.kind = "parameter"
        if up[-1] not in ("__init__", "__new__", "__post_init__"):
            for (p, q), why in base.family((row.path, up[:-1]), up[-1]).items():
                if (*q, up[-1], row.old) in base.files[p].params:
                    row.keys[(p, (*q, up[-1], row.old))] = why
    elif qual in file.params:
        row.kind = "parameter"
    elif len(qual) == 1:
        row.kind = "module"
    else:
        row.kind = "local"
    return None


def sites(base, row):
    """Where a request is sent: each definition; of a module and a class, not what a comprehension binds."""
    for path, qual in row.keys:
        found = base.files[path].defs[qual]
        if row.kind in ("module", "member") and not all(inner for _, inner in found):
            found = [one for one in found if not one[1]]
        if row.only is not None:
            found = [one for one in found if base.files[path].line(one[0]) == row.only]
        for offset, _ in found:
            yield path, offset


def to_path(root, uri):
    path = pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(uri).path))
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else None


def request(server, base, row):
    for path, offset in list(sites(base, row)):
        span = (path, offset, offset + len(row.old))
        if span in row.edits:
            continue
        file = base.files[path]
        try:
            answer = server.ask("textDocument/rename", {**server.at(file, offset), "newName": row.new})
        except RuntimeError as error:
            row.notes.append(f"refused at {path}:{file.line(offset)}: {error}")
            continue
        changes = dict((answer or {}).get("changes") or {})
        for change in (answer or {}).get("documentChanges") or ():
            changes.setdefault(change["textDocument"]["uri"], []).extend(change["edits"])
        for uri, edits in changes.items():
            at = to_path(base.root, uri)
            if at not in base.files:
                row.fault = f"edits outside of the code: {uri}"
                return
            other = base.files[at]
            for edit in edits:
                start, end = other.of_lsp(edit["range"]["start"]), other.of_lsp(edit["range"]["end"])
                if other.text[start:end] != row.old:
                    row.notes.append(f"odd edit left out, {at}:{other.line(start)}: {other.text[start:end]!r} -> {edit['newText']!r}")
                    continue
                row.edits[(at, start, end)] = edit["newText"]
        if span not in row.edits:
            row.notes.append(f"no edits from {path}:{file.line(offset)}")
    for path, qual in row.keys:
        for offset, inner in base.files[path].defs[qual]:
            if (path, offset) in set(sites(base, row)) and (path, offset, offset + len(row.old)) not in row.edits:
                row.fault = row.fault or f"no edit of the definition at {path}:{base.files[path].line(offset)}"


def definition(server, base, file, offset):
    """Where the language server says that a name is defined: [(path or None, offset)]."""
    answer = server.ask("textDocument/definition", server.at(file, offset)) or []
    found = []
    for one in answer if isinstance(answer, list) else [answer]:
        uri, span = one.get("uri") or one["targetUri"], one.get("range") or one["targetSelectionRange"]
        at = to_path(base.root, uri)
        found.append((at, base.files[at].of_lsp(span["start"])) if at in base.files else (None, 0))
    return found


def really(base, found, name):
    """Of the places that the server gives, those of the name: for a member of Any it gives a function around it."""
    return [(p, o) for p, o in found if p is None or base.files[p].text[o : o + len(name)] == name or base.files[p].text[max(0, o - 2) : o] == "**"]


def hover(server, file, offset):
    answer = server.ask("textDocument/hover", server.at(file, offset)) or {}
    contents = answer.get("contents", "")
    return contents if isinstance(contents, str) else contents.get("value", "") if isinstance(contents, dict) else str(contents)


def tail(file, node):
    """Offset of the last name of an expression such as `a.b.c` or `f(x)`."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return file.attribute(node)
    return file.at(node.lineno, node.col_offset) if isinstance(node, ast.Name) else None


def leftovers(server, base, rows, untyped):
    """Attributes and keywords of an old name that no edit covers: mended where their owner is proven, listed otherwise."""
    wanted = collections.defaultdict(list)
    for row in rows:
        if row.kind in ("member", "parameter", "module"):
            wanted[row.old].append(row)
    edited = {span for row in rows for span in row.edits}
    left = []
    for path, file in base.files.items():
        if not any(name in file.text for name in wanted):
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and node.attr in wanted:
                _attribute(server, base, file, node, wanted[node.attr], edited, untyped, left)
            elif isinstance(node, ast.Call):
                for word in node.keywords:
                    if word.arg in wanted:
                        _keyword(server, base, file, node, word, wanted[word.arg], edited, left)
            elif isinstance(node, ast.MatchClass):
                for name in node.kwd_attrs:
                    if name in wanted and (path, (at := file.word(node, name)), at + len(name)) not in edited:
                        left.append((wanted[name][0], path, at, "in a pattern of `case`"))
            elif isinstance(node, FUNCTIONS) and (path.startswith("tests/")):
                for arg in node.args.args:
                    for row in wanted.get(arg.arg, ()):
                        if row.kind == "module" and row.path.startswith("tests/") and _is_fixture(base, row):
                            left.append((row, path, file.at(arg.lineno, arg.col_offset), "a parameter that asks for the fixture"))
    return left


def _is_fixture(base, row):
    for path, qual in row.keys:
        for node in base.files[path].functions.get(qual, ()):
            return any("fixture" in ast.unparse(d) for d in node.decorator_list)
    return False


def _attribute(server, base, file, node, rows, edited, untyped, left):
    offset = file.attribute(node)
    span = (file.path, offset, offset + len(node.attr))
    if span in edited:
        return
    rows = [r for r in rows if r.kind == "member"] or [r for r in rows if r.kind == "module"]
    if not rows or really(base, definition(server, base, file, offset), node.attr):
        return
    row = rows[0]
    if row.kind == "module":
        receiver = base.resolve(file, (), node.value)
        if receiver is None or receiver[0] != "mod":
            return
    covered = {key for r in rows for key in r.keys}
    alone = len({r.new for r in rows}) == 1 and all(k in covered for k in base.keys[row.old] if k[1][:-1] in base.files[k[0]].classes)
    if untyped and alone and row.kind == "member" and row.old not in known_names():
        row.edits[span] = row.new
        row.notes.append(f"UNTYPED renamed {file.path}:{file.line(offset)}: {file.lines[file.line(offset) - 1].strip()[:100]}")
    else:
        left.append((row, file.path, offset, "receiver of unknown type" + (", no other member of this name in the code: --untyped" if alone and row.old not in known_names() else "")))


def _keyword(server, base, file, call, word, rows, edited, left):
    offset = file.at(word.lineno, word.col_offset)
    span = (file.path, offset, offset + len(word.arg))
    if span in edited:
        return
    rows = [r for r in rows if r.kind in ("member", "parameter")]
    if not rows or any(not _is_any_keyword(base, at) for at in really(base, definition(server, base, file, offset), word.arg)):
        return
    callee = tail(file, call.func)
    name = file.text[callee : file.at(call.func.end_lineno, call.func.end_col_offset)] if callee is not None else ""
    where = definition(server, base, file, callee) if callee is not None else []
    if where and all(p is None for p, _ in where) and name not in (*COPIES, "partial"):
        return  # a function of a library
    shown, called_here = "", set()
    for p, o in where:
        if p is not None:
            called_here |= {(p, q) for q in base.files[p].functions | base.files[p].classes if any(o == x for x, _ in base.files[p].defs[q])}
    for row in rows:
        proof = None
        if row.kind == "parameter" and called_here:
            if any((p, q[:-1]) in called_here or (q[-2] == "__init__" and (p, q[:-2]) in called_here) for p, q in row.keys):
                proof = "callee"
            elif any((*q, row.old) in base.files[p].params or (*q, "__init__", row.old) in base.files[p].params for p, q in called_here):
                continue  # of another function that has such a parameter
        owners = {o for o in row.owners} | {k for o in row.owners for k in base.below(o)}
        if proof:
            pass
        elif row.kind == "member" and name in COPIES:
            receiver = call.args[0] if isinstance(call.func, ast.Name) or ast.unparse(call.func).startswith("dataclasses.") else call.func.value
            place = tail(file, receiver) if receiver is not None else None
            text = hover(server, file, place) if place is not None else ""
            shown = re.split(r"->|: ", text.strip().split("\n")[0])[-1]
            if not shown or set(re.findall(r"\w+", shown)) & {"Self"} and place is not None:
                inside = [q for q in file.classes if file.classes[q].lineno <= call.lineno <= file.classes[q].end_lineno]
                shown = " ".join(q[-1] for q in inside) or shown
            if any(re.search(rf"\b{q[-1]}\b", shown) for _, q in owners):
                proof = "replace"
            elif any(re.search(rf"\b{q[-2]}\b", shown) for _, q in base.keys[row.old] if len(q) > 1 and q[:-1] in base.files[_].classes):
                continue  # of another class that has such a field
        elif name == "partial" and call.args and (place := tail(file, call.args[0])) is not None:
            called = definition(server, base, file, place)
            for path, qual in row.keys:
                if any((path, o) in called for o, _ in base.files[path].defs[qual[:-1]]):
                    proof = "partial"
                if qual[-2:-1] == ("__init__",) and any((path, o) in called for o, _ in base.files[path].defs[qual[:-2]]):
                    proof = "partial"
        elif callee is not None and row.kind == "member":
            if any((p, o) in where for p, q in owners for o, _ in base.files[p].defs[q]):
                proof = "constructor"
        if proof:
            row.edits[span] = row.new
            edited.add(span)
            row.notes.append(f"{proof.upper()} renamed {file.path}:{file.line(offset)}: {file.lines[file.line(offset) - 1].strip()[:100]}")
            return
        left.append((row, file.path, offset, f"keyword of {ast.unparse(call.func)[:40]}(…), unknown to the server{f', receiver {shown}' if shown else ''}"))


def _is_any_keyword(base, at):
    """A definition that is the `**keywords` of a function."""
    path, offset = at
    return path is None or base.files[path].text[max(0, offset - 2) : offset] == "**"


_KNOWN = []


def known_names():
    """Members that Python's own types have: never renamed on a receiver of unknown type."""
    if not _KNOWN:
        _KNOWN.append({n for t in (str, bytes, list, dict, set, tuple, int, float, complex, pathlib.Path, Exception, type, io.StringIO, ast.AST) for n in dir(t)})
        _KNOWN[0] |= set(foreign_members(["torch.Tensor", "torch.nn.Module", "numpy.ndarray", "PIL.Image.Image", "numpy.random.Generator", "argparse.Namespace"]))
    return _KNOWN[0]


def foreign_members(names):
    code = (
        "import importlib, json, sys\nout=[]\nfor n in json.loads(sys.argv[1]):\n parts=n.split('.')\n"
        " for i in range(len(parts)-1,0,-1):\n  try:\n   o=importlib.import_module('.'.join(parts[:i]))\n   for p in parts[i:]: o=getattr(o,p)\n"
        "   out+=dir(o); break\n  except Exception: pass\nprint(json.dumps(out))"
    )
    done = subprocess.run([PYTHON, "-c", code, json.dumps(names)], capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return []


# ---------------------------------------------------------------- collisions


def check_members(base, rows, cache):
    """The new name in the classes of a family, above them and below them."""
    for row in rows:
        if row.kind != "member" or row.fault:
            continue
        related = dict.fromkeys(row.owners)
        for key in list(row.owners):
            related.update(dict.fromkeys([*base.above(key), *base.below(key)]))
        for key in related:
            if base.has(key, row.new):
                free = any(r.old == row.new and not r.fault and key in r.owners for r in rows)
                if not free:
                    row.fault = f"COLLISION: {'.'.join(key[1])} of {key[0]} has {row.new!r} already"
                    break
        foreign = sorted({n for key in related for n in base.foreign.get(key, ()) if n not in ("typing.Protocol", "abc.ABC", "typing.Generic")})
        if foreign and not row.fault:
            names = []
            for name in foreign:
                if name not in cache:
                    cache[name] = set(foreign_members([name]))
                names += [(name, n) for n in cache[name]]
            for name, n in names:
                if n == row.old and not row.old.startswith("_"):
                    row.fault = f"overrides {name}.{n}, which is not of this code"
                elif n == row.new:
                    row.fault = f"COLLISION: {name} has {n!r}"


def check_submodules(base, rows):
    for row in rows:
        if row.kind == "module" and not row.fault:
            for path in {p for p, _, _ in row.edits if p.endswith("__init__.py")}:
                if f"{module_of(path)}.{row.new}" in base.modules:
                    row.fault = f"COLLISION: {module_of(path)} has a module {row.new!r}"


def merged(rows):
    """All edits by file; a row whose edit of one range differs from an earlier row's is at fault."""
    taken, by_file = {}, collections.defaultdict(dict)
    for row in rows:
        if row.fault:
            continue
        for span, new in row.edits.items():
            if taken.setdefault(span, (new, row))[0] != new:
                row.fault = f"CONFLICT with row {taken[span][1]} at {span[0]}:{span[1]}"
                break
    for row in rows:
        if not row.fault:
            for (path, start, end), new in row.edits.items():
                by_file[path][(start, end)] = new
    return by_file


def applied(file, edits):
    text, last, out = file.text, 0, []
    for (start, end), new in sorted(edits.items()):
        out += [text[last:start], new]
        last = end
    return "".join([*out, text[last:]])


def settle(base, rows):
    """Drop rows until nothing collides; complete what the server missed of a name in one scope. Gives the edits."""
    cache, clean = {}, {}
    for _ in range(200):
        check_members(base, rows, cache)
        check_submodules(base, rows)
        by_file = merged(rows)
        changed, fresh = False, [r for r in rows if not r.fault]  # at the beginning of this round
        for path, edits in sorted(by_file.items()):
            file = base.files[path]
            if clean.get(path) == edits:
                continue
            try:
                after = ast.parse(applied(file, edits))
            except SyntaxError as error:
                faults, partial = [("?", "?", error.lineno, f"syntax: {error}")], []
            else:
                faults, partial = captured(file.tree, after)
            if not faults and not partial:
                clean[path] = edits
            here = [r for r in rows if not r.fault and any(p == path for p, _, _ in r.edits)]
            for old, new, line, column in partial:
                for row in here:
                    if row.old == old and row.new == new:
                        start = file.at(line, column)
                        row.edits[(path, start, start + len(old))] = new
                        row.notes.append(f"COMPLETED {path}:{line}: {file.lines[line - 1].strip()[:100]}")
                        changed = True
                        break
            for old, new, line, why in faults:
                rows_here = [r for r in rows if r in fresh and any(p == path for p, _, _ in r.edits)]
                blamed = [r for r in rows_here if r.new == new] or [r for r in rows_here if r.new == old] or [r for r in rows_here if r.old == old] or rows_here
                for row in blamed:
                    if not row.fault:
                        row.fault = f"COLLISION: {path}:{line}: {why} ({old} -> {new})"
                        changed = True
        if not changed and not any(r.fault is None and not r.edits for r in rows):
            return merged(rows)
        for r in rows:
            if r.fault is None and not r.edits:
                r.fault = "no edits"
    raise SystemExit("the collisions do not settle")


# ---------------------------------------------------------------- strings


def nearest(base, file, scope, name):
    """The (path, qual) that a name in a docstring of this scope most likely means; None without one."""
    for n in range(len(scope), -1, -1):
        inside = scope[:n]
        if (*inside, name) in file.defs and ((inside, name) not in file.imports):
            return (file.path, (*inside, name))
        if inside in file.classes:
            for path, qual in base.above((file.path, inside)):
                if base.has((path, qual), name):
                    return (path, (*qual, name))
        if (inside, name) in file.imports:
            found = base.named(file, inside, name)
            return tuple(found[1:]) if found and found[0] == "def" else ("", ())
    return None


def scoped(tree):
    """Each node with the names of its scopes, and whether it is a docstring; and its call with the position in it."""
    stack = [(tree, ())]
    while stack:
        node, qual = stack.pop()
        yield node, qual
        inner = (*qual, node.name) if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else qual
        stack += [(child, inner) for child in ast.iter_child_nodes(node)]


def strings(base, rows, by_file, apply):
    """STRING lines; with `apply`, edits of those that are certain are added to `by_file`."""
    rows = [r for r in rows if not r.fault]
    of_name = collections.defaultdict(list)
    for row in rows:
        of_name[row.old].append(row)
    keys = {key: row for row in rows for key in row.keys}
    word = re.compile(r"(?<![\w])(" + "|".join(map(re.escape, of_name)) + r")(?![\w])") if of_name else None
    lines, done = [], []

    def say(path, line, row, text, why, fixed, column=None):
        one = ("FIXED STRING" if fixed else "STRING", path, line, column, row, why, text.strip()[:140])
        if one not in (done if fixed else lines):
            (done if fixed else lines).append(one)

    for path, file in base.files.items() if word else ():
        if not word.search(file.text):
            continue
        docs, context, handled = {}, {}, set()
        for node, qual in scoped(file.tree):
            if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant) and isinstance(node.body[0].value.value, str):
                docs[id(node.body[0].value)] = (*qual, node.name) if not isinstance(node, ast.Module) else ()
            if isinstance(node, ast.Call):
                for i, arg in enumerate(node.args):
                    context[id(arg)] = ("call", node, i, qual)
                if ast.unparse(node.func).split(".")[-1] == "Mutant":
                    mutant(base, file, node, qual, rows, by_file, keys, apply, say, handled)
            if isinstance(node, FUNCTIONS):
                for d in node.decorator_list:
                    if isinstance(d, ast.Call) and ast.unparse(d.func).endswith("parametrize") and d.args:
                        for c in ast.walk(d.args[0]):
                            context[id(c)] = ("parametrize", (*qual, node.name))
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and target.id in ("__all__", "__slots__", "__match_args__"):
                    for c in ast.walk(node.value):
                        context[id(c)] = ("all", qual, target.id)
        for node, qual in scoped(file.tree):
            joined = isinstance(node, ast.JoinedStr) and id(node) in file.fields
            if not joined and not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in handled or id(node) in file.pieces:
                continue
            value = "" if joined else node.value
            begin, end = file.at(node.lineno, node.col_offset), file.at(node.end_lineno, node.end_col_offset)
            for found in word.finditer(file.text, begin, end):
                span, name = (found.start(), found.end()), found[0]
                if span in by_file.get(path, {}) or (joined and any(a <= span[0] < b for a, b in file.fields[id(node)])):
                    continue
                line = file.line(found.start())
                text = file.lines[line - 1]
                row, why, sure = of_name[name][0], None, False
                before, after = file.text[max(begin, span[0] - 40) : span[0]], file.text[span[1] : min(end, span[1] + 40)]
                others = base.keys[name] - set(row.keys)
                unique = not others and len(of_name[name]) == 1
                if id(node) in docs:
                    whole = file.text[begin:end]
                    ticks = file.text.count("`", begin, span[0]) % 2 == 1 or before.endswith("``")
                    if not ticks:
                        continue
                    why = "docstring"
                    bare = re.search(r"`$", before) and re.match(r"`|\(|\[| ", after)
                    target = nearest(base, file, docs[id(node)], name)
                    if not before.endswith(".") and target in keys and bare:
                        row, sure = keys[target], True
                    elif target is not None and not before.endswith("."):
                        continue  # it means another symbol of the same name
                    else:
                        sure = unique and path.startswith("src/") and bool(bare or before.endswith("."))
                elif (where := context.get(id(node))) and where[0] == "parametrize":
                    key = (path, (*where[1], name))
                    if key not in keys:
                        continue
                    row, why, sure = keys[key], "parametrize", True
                elif where and where[0] == "all" and value == name:
                    target = nearest(base, file, where[1], name)
                    why, sure = where[2], target in keys
                    if not sure:
                        continue
                    row = keys[target]
                elif where and where[0] == "call" and (called := ast.unparse(where[1].func).split(".")[-1]) in PATCHERS and (value == name or value.endswith("." + name)):
                    why = called
                    if "." in value:
                        target = dotted(base, value)
                    elif where[2] > 0:
                        owner = base.resolve(file, qual, where[1].args[0])
                        target = base.member(owner, name) if owner and owner[0] != "ext" else None
                        if owner and owner[0] == "ext":
                            continue
                    else:
                        target = None
                    if target and target[0] == "def":
                        if tuple(target[1:]) not in keys:
                            continue
                        row, sure = keys[tuple(target[1:])], True
                    else:
                        sure = unique and where[2] == 1
                elif row.kind == "local":
                    continue
                elif value == name:
                    why = "exact"
                elif row.kind == "parameter":
                    why = "like code" if re.match(r"=[^=\s]", after) else None
                elif re.fullmatch(r"[\w.]+", value):
                    target = dotted(base, value)
                    if target and target[0] == "def" and tuple(target[1:]) in keys:
                        row, why, sure = keys[tuple(target[1:])], "dotted", True
                    elif value.endswith("." + name) or value.startswith(name + "."):
                        why = "dotted"
                elif before.endswith("`") or (after.startswith("`") and "`" in before):
                    why = "backticks"
                elif where and where[0] == "call" and where[2] in (3, 4) and ast.unparse(where[1].func) == "Mutant":
                    why = "mutant"
                elif re.search(r"[\w)\]]\.$", before) or re.match(r"\(|\.\w|\[|\s*=(?!=)\s*\S", after) and not re.match(r"\. ", after):
                    why = "like code"
                elif row.kind == "module" and len(value.split()) > 2 and sum(w in base.keys for w in value.split()) > 0.8 * len(value.split()):
                    why, sure = "list of names", row.kind == "module" and unique
                elif "_" in name.strip("_"):
                    why = "word"
                if why is None:
                    continue
                if apply and sure:
                    by_file[path][span] = row.new
                say(path, line, row, text, why, apply and sure, span[0] - file.starts[line - 1])
        if not re.search(rf"#.*(?<!\w)(?:{'|'.join(map(re.escape, of_name))})(?!\w)", file.text):
            continue
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(file.text).readline))
        except (tokenize.TokenError, SyntaxError):
            tokens = []
        for token in tokens:
            if token.type == tokenize.COMMENT:
                for found in word.finditer(token.string):
                    row = of_name[found[0]][0]
                    if row.kind in ("local", "parameter"):
                        continue
                    before, after = token.string[: found.start()], token.string[found.end() :]
                    if before.endswith("`") or re.search(r"\w\.$", before) or re.match(r"\(|`", after) or "_" in found[0].strip("_"):
                        say(path, token.start[0], row, token.line, "comment", False, token.start[1] + found.start())
    for path in texts(base.root) if word else ():
        text = path.read_text(encoding="utf-8", errors="replace")
        at, fenced = path.relative_to(base.root).as_posix(), False
        for number, line in enumerate(text.splitlines(), 1):
            if path.suffix == ".md" and line.lstrip().startswith("```"):
                fenced = not fenced
                continue
            pieces = [line] if fenced else re.findall(r"`[^`]*`" if path.suffix == ".md" else r"\{\{.*?\}\}|\{%.*?%\}", line)
            for name in dict.fromkeys(n for piece in pieces for n in word.findall(piece) if any(r.kind != "local" for r in of_name[n])):
                for found in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", line):
                    if fenced or any(piece_at <= found.start() < piece_at + len(piece) for piece in pieces for piece_at in [line.find(piece)]):
                        say(at, number, of_name[name][0], line, "text", False, found.start())
    return lines, done


def texts(root):
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "src/**/*.html", "src/**/*.j2", "examples/**/*.md"):
        yield from sorted(root.glob(pattern))


def dotted(base, text):
    """What `camscope.measure.measure` names."""
    parts = text.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:n]) in base.modules:
            found = base.module(".".join(parts[:n]))
            for part in parts[n:]:
                found = base.member(found, part)
            return found
    return None


def mutant(base, file, call, scope, rows, by_file, keys, apply, say, handled):
    """The strings of `Mutant(slip, owner, name, old, new, check)` follow the renames within the function that they change."""
    named = {k.arg: k.value for k in call.keywords}
    owner, name, *snippets = [named.get(k) or (call.args[i] if len(call.args) > i else None) for i, k in ((1, "owner"), (2, "name"), (3, "old"), (4, "new"))]
    if not all(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in (name, *snippets)):
        return
    found = base.member(base.resolve(file, scope, owner), name.value)
    if not found or found[0] != "def":
        return
    other = base.files[found[1]]
    nodes = other.functions.get(tuple(found[2]), ())
    edits = by_file.get(found[1], {})
    if not nodes:
        return
    node = nodes[-1]
    start = other.starts[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1]
    end = other.at(node.end_lineno, node.end_col_offset)
    inside = {span: new for span, new in edits.items() if start <= span[0] < end}
    if not inside:
        handled.update(id(n) for n in snippets)  # nothing of this function is renamed
        return
    text = textwrap.dedent(other.text[start:end])
    if text.count(snippets[0].value) != 1:
        return
    mapping = {}
    for (a, b), new in inside.items():
        mapping.setdefault(other.text[a:b], set()).add(new)
    after = textwrap.dedent(applied_piece(other.text, start, end, inside))
    fresh = []
    for snippet in snippets:
        value = snippet.value
        for old, news in mapping.items():
            value = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", sorted(news)[0], value)
        fresh.append(value)
    fits = after.count(fresh[0]) == 1
    if not fits:  # some names of the snippet stayed: take only as many as fit
        for old in list(mapping):
            trial = snippets[0].value
            for o, news in mapping.items():
                if o != old:
                    trial = re.sub(rf"(?<!\w){re.escape(o)}(?!\w)", sorted(news)[0], trial)
            if after.count(trial) == 1:
                second = snippets[1].value
                for o, news in mapping.items():
                    if o != old:
                        second = re.sub(rf"(?<!\w){re.escape(o)}(?!\w)", sorted(news)[0], second)
                fresh, fits = [trial, second], True
                break
    title = mapping.get(name.value)
    if title and tuple(found[1:]) in keys:
        _replace_literal(file, name, keys[tuple(found[1:])].new, by_file, apply, say, keys[tuple(found[1:])], handled)
    for snippet, value in zip(snippets, fresh, strict=True):
        if value != snippet.value:
            words = set(re.findall(r"\w+", snippet.value))
            row = next(r for r in rows if r.old in words and r.old in mapping)
            _replace_literal(file, snippet, value, by_file, apply and fits, say, row, handled)


def applied_piece(text, start, end, edits):
    out, last = [], start
    for (a, b), new in sorted(edits.items()):
        out += [text[last:a], new]
        last = b
    return "".join([*out, text[last:end]])


def _replace_literal(file, node, value, by_file, apply, say, row, handled):
    start, end = file.at(node.lineno, node.col_offset), file.at(node.end_lineno, node.end_col_offset)
    source = file.text[start:end]
    fixed = False
    if apply and any(start < b and a < end for a, b in by_file.get(file.path, {})):
        handled.add(id(node))  # done already (two mutants share no literal; the server edited it)
        return
    if apply:
        old_words, new_words = re.findall(r"\w+|\W+", node.value), re.findall(r"\w+|\W+", value)
        if len(old_words) == len(new_words):  # word by word in the source, so that quotes and escapes stay
            pieces, at, ok = [], start, True
            for a, b in zip(old_words, new_words, strict=True):
                if not a.strip() or not re.match(r"\w", a):
                    continue
                found = re.compile(rf"(?<!\w){re.escape(a)}(?!\w)").search(file.text, at, end)
                if not found:
                    found = re.compile(re.escape(a)).search(file.text, at, end)
                if not found:
                    ok = False
                    break
                if a != b:
                    pieces.append((found.start(), found.end(), b))
                at = found.end()
            if ok:
                for a, b, new in pieces:
                    by_file[file.path][(a, b)] = new
                fixed = True
    if fixed:
        handled.add(id(node))
    elif apply:
        pass
    else:
        handled.add(id(node))
    say(file.path, node.lineno, row, f"{source}  =>  {value!r}", "mutant of this function", fixed)


# ---------------------------------------------------------------- all of it


def tell(base, by_file, dry, one):
    """One line of the report; the column (from 0) is that after the edits, as `--mend` takes it."""
    kind, path, line, column, row, why, text = one
    if column is not None and not dry and path in base.files:
        start = base.files[path].starts[line - 1]
        column += sum(len(new) - (b - a) for (a, b), new in by_file.get(path, {}).items() if start <= a < start + column)
    print(f"{kind} {path}:{line}{'' if column is None else f':{column}'} {row.old} -> {row.new} [{why}]: {text}")


def mend(root, report):
    """Replace what the lines `LEFT path:line:column old -> new` and `STRING …` of a report say."""
    todo, done, wrong = collections.defaultdict(set), 0, []
    for line in report.read_text().splitlines():
        if found := re.match(r"(?:LEFT|STRING) (\S+?):(\d+):(\d+) (\w+) -> (\w+) ", line):
            path, number, column, old, new = found.groups()
            todo[path].add((int(number), int(column), old, new))
        elif line.startswith(("LEFT", "STRING")):
            wrong.append("no column: " + line)
    for path, places in todo.items():
        with (root / path).open(encoding="utf-8", newline="") as f:
            lines = f.read().split("\n")
        for number, column, old, new in sorted(places, reverse=True):
            text = lines[number - 1]
            if re.compile(rf"(?<!\w){old}(?!\w)").match(text, column):
                lines[number - 1] = text[:column] + new + text[column + len(old) :]
                done += 1
            else:
                wrong.append(f"{path}:{number}:{column} is not {old!r}: {text.strip()[:100]}")
        with (root / path).open("w", encoding="utf-8", newline="") as f:
            f.write("\n".join(lines))
    print(*wrong, f"{done} places mended in {len(todo)} files, {len(wrong)} not", sep="\n")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--strings", action="store_true", help="replace strings that certainly name a renamed symbol")
    parser.add_argument("--untyped", action="store_true", help="rename x.old of an unknown type too, where the family is the only one with this member")
    parser.add_argument("--no-left", action="store_true", help="do not look for uses that the server cannot see")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("/tmp/rename-server.log"))
    parser.add_argument("--verbose", action="store_true", help="list each file with its number of edits")
    parser.add_argument("--mend", action="store_true", help="TABLE is a report: replace what its LEFT and STRING lines say (delete the wrong ones first)")
    options = parser.parse_args()
    if options.mend:
        return mend(options.root.resolve(), options.table)
    root, start = options.root.resolve(), time.time()
    clock = lambda: f"{time.time() - start:6.1f} s"  # noqa: E731
    base = Base(root)
    rows = [Row(i, *row[:3]) for i, row in enumerate(json.loads(options.table.read_text()))]
    for row in rows:
        row.fault = locate(base, row)
    print(f"{clock()} {len(base.files)} files read, {sum(not r.fault for r in rows)} of {len(rows)} rows located", flush=True)
    left = []
    if any(not r.fault for r in rows):
        with options.log.open("w") as log:
            server = Server(root, log)
            try:
                server.open(base.files[next(r.path for r in rows if not r.fault)])
                if not server.ready.wait(120):
                    raise SystemExit(f"the language server is not ready; see {options.log}")
                print(f"{clock()} the language server is ready", flush=True)
                for n, row in enumerate(rows):
                    if not row.fault:
                        before = time.time()
                        request(server, base, row)
                        if time.time() - before > 5 or (n + 1) % 50 == 0:
                            print(f"{clock()} row {n + 1} of {len(rows)}", flush=True)
                if not options.no_left:
                    left = leftovers(server, base, [r for r in rows if not r.fault], options.untyped)
            finally:
                server.close()
    print(f"{clock()} all answers are here", flush=True)
    by_file = settle(base, rows)
    lines, done = strings(base, rows, by_file, options.strings)
    print(f"{clock()} {sum(map(len, by_file.values()))} edits in {len(by_file)} files{' (dry: nothing is written)' if options.dry else ''}")
    for row in rows:
        if not row.fault:
            print(f"ROW {row}: {len(row.edits)} edits in {len({p for p, _, _ in row.edits})} files")
            for (path, qual), why in row.keys.items():
                if why:
                    print(f"    FAMILY {why}: {path} {'.'.join(qual)}")
            for note in row.notes:
                print(f"    {note}")
    if options.verbose:
        for path, edits in sorted(by_file.items()):
            print(f"FILE {path}: {len(edits)}")
    broken = False
    if not options.dry:
        for path, edits in by_file.items():
            with base.files[path].absolute.open("w", encoding="utf-8", newline="") as f:
                f.write(applied(base.files[path], edits))
        done_ = subprocess.run([PYTHON, "-m", "compileall", "-q", str(root / "src")], capture_output=True, text=True, check=False,
                               env={**os.environ, "PYTHONPYCACHEPREFIX": "/tmp/rename-pycache"})  # fmt: skip
        broken = done_.returncode != 0
        print("compileall of src: " + ("FAILED\n" + done_.stdout + done_.stderr if broken else "ok"))
    told = set()
    for row, path, offset, why in left:
        file = base.files[path]
        if (path, offset) not in told and not told.add((path, offset)) and not row.fault and (path, offset, offset + len(row.old)) not in row.edits:
            line = file.line(offset)
            tell(base, by_file, options.dry, ("LEFT", path, line, offset - file.starts[line - 1], row, why, file.lines[line - 1].strip()[:140]))
    for one in [*done, *sorted(lines, key=lambda one: (one[5] == "text") + 2 * (one[5] == "exact"))]:
        tell(base, by_file, options.dry, one)
    failures = [r for r in rows if r.fault]
    for row in failures:
        print(f"FAILED {row}: {row.fault}")
        for note in row.notes:
            print(f"    {note}")
    print(f"{clock()} {len(rows) - len(failures)} rows {'would be ' if options.dry else ''}applied, {len(failures)} failed, {len(lines)} strings to mend, {sum(not r.fault for r, *_ in left)} uses left")
    return 1 if failures or broken else 0


if __name__ == "__main__":
    sys.exit(main())
