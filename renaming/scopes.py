"""Scopes of a Python file: which binding each name means, with byte positions for precise edits."""

import ast
import builtins
import re

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Scope:
    def __init__(self, kind, node, parent):
        self.kind, self.node, self.parent = kind, node, parent
        self.bound, self.globals, self.nonlocals = set(), set(), set()

    def chain(self):
        scope = self
        while scope is not None:
            yield scope
            scope = scope.parent


class File:
    """A parsed source: names, where they are bound, and edits by position."""

    def __init__(self, text, where):
        self.text, self.where = text, where
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(text)
        self.module = Scope("module", self.tree, None)
        self.scope_of = {}  # import node -> scope
        self.names = []  # (Name node, scope where it is looked up)
        self.parents = {}
        self.fstring = {}  # node inside of an f-string -> the JoinedStr
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name | ast.Attribute):
                        self.fstring.setdefault(inner, node)  # the outermost comes first in a walk
        self._visit_all(self.tree.body, self.module)
        self.edits = []

    # --- scopes

    def _visit_all(self, nodes, scope):
        for node in nodes:
            self._visit(node, scope)

    def _visit(self, node, scope):
        if node is None:
            return
        if isinstance(node, ast.Name):
            self.names.append((node, scope))
            if not isinstance(node.ctx, ast.Load):
                self._bind(node.id, scope)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._bind(node.name, scope)
            self._visit_all(node.decorator_list, scope)
            self._signature(node.args, scope)
            self._visit(node.returns, scope)
            inner = Scope("function", node, scope)
            self._parameters(node.args, inner)
            self._visit_all(node.body, inner)
        elif isinstance(node, ast.Lambda):
            self._signature(node.args, scope)
            inner = Scope("function", node, scope)
            self._parameters(node.args, inner)
            self._visit(node.body, inner)
        elif isinstance(node, ast.ClassDef):
            self._bind(node.name, scope)
            self._visit_all([*node.decorator_list, *node.bases, *node.keywords], scope)
            self._visit_all(node.body, Scope("class", node, scope))
        elif isinstance(node, COMPREHENSIONS):
            inner = Scope("comprehension", node, scope)
            for n, generator in enumerate(node.generators):
                self._visit(generator.iter, inner if n else scope)
                self._visit(generator.target, inner)
                self._visit_all(generator.ifs, inner)
            self._visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inner)
        elif isinstance(node, ast.NamedExpr):
            home = scope
            while home.kind == "comprehension":
                home = home.parent
            self._bind(node.target.id, home)
            self.names.append((node.target, home))
            self._visit(node.value, scope)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.scope_of[node] = scope
            for alias in node.names:
                self._bind(alias.asname or alias.name.split(".")[0], scope)
        elif isinstance(node, ast.Global):
            scope.globals |= set(node.names)
        elif isinstance(node, ast.Nonlocal):
            scope.nonlocals |= set(node.names)
        elif isinstance(node, ast.AnnAssign) and node.value is None and scope.kind == "class" and isinstance(node.target, ast.Name):
            self._visit(node.annotation, scope)  # binds nothing: `scans: scans.Scans` means the module
        else:
            for field in ("name", "rest"):
                if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping):
                    value = getattr(node, field, None)
                    if isinstance(value, str):
                        self._bind(value, scope)
            for child in ast.iter_child_nodes(node):
                self._visit(child, scope)

    def _signature(self, args, scope):
        self._visit_all([*args.defaults, *[d for d in args.kw_defaults if d]], scope)
        for arg in self._all(args):
            self._visit(arg.annotation, scope)

    def _parameters(self, args, inner):
        for arg in self._all(args):
            self._bind(arg.arg, inner)

    @staticmethod
    def _all(args):
        return [a for a in [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg] if a]

    def _bind(self, name, scope):
        if name in scope.globals:
            self.module.bound.add(name)
        elif name not in scope.nonlocals:
            scope.bound.add(name)

    def resolve(self, name, scope):
        """The scope that binds the name, seen from `scope`; None for a builtin."""
        for depth, each in enumerate(scope.chain()):
            if name in each.globals:
                return self.module
            if name in each.bound and (each.kind != "class" or depth == 0):
                return each
        return None

    def uses(self, name, scope):
        return [(node, at) for node, at in self.names if node.id == name and self.resolve(name, at) is scope]

    def clashes(self, name, scope, uses, same=False):
        """Why `name` cannot be bound in `scope` and be used at `uses`; None where it can."""
        if name in scope.bound and not same:
            return "is bound there"
        for _, at in uses:
            for each in at.chain():
                if each is scope:
                    break
                if name in each.bound and (each.kind != "class" or each is at):
                    return f"is a local name of {getattr(each.node, 'name', each.kind)}, line {getattr(each.node, 'lineno', 0)}"
        for node, at in self.names:
            if node.id == name and not same:
                chain = list(at.chain())
                home = self.resolve(name, at)
                if scope in chain and (home is None or (home in chain and chain.index(home) > chain.index(scope))):
                    return f"means another thing in line {node.lineno}"
        return None

    def builtin_uses(self):
        return {node.id for node, at in self.names if self.resolve(node.id, at) is None and hasattr(builtins, node.id)}

    # --- positions and edits

    def at(self, line, column):
        return self.starts[line - 1] + column

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def source(self, node):
        start, end = self.span(node)
        return self.data[start:end].decode()

    def replace(self, node, text, expected=None):
        """Put text in the place of a node, also inside of f-strings, whose positions Python 3.11 gets wrong."""
        outer = self.fstring.get(node)
        if outer is not None:
            wanted = expected or ast.unparse(node)
            start, end = self.span(node)
            if self.data[start:end].decode(errors="replace") != wanted or not (self.span(outer)[0] <= start < self.span(outer)[1]):
                left, right = self.span(outer)
                piece = self.data[left:right].decode()
                pattern = r"(?<![\w.\"'])" + re.escape(wanted) + r"(?!\w)"
                inside = [m for m in re.finditer(pattern, piece) if _in_braces(piece, m.start())]
                same = [n for n in self.fstring if self.fstring[n] is outer and type(n) is type(node) and ast.unparse(n) == wanted]
                if len(inside) != len(same):
                    raise ValueError(f"{self.where}:{node.lineno}: cannot place {wanted!r} in an f-string")
                same.sort(key=lambda n: (n.lineno, n.col_offset))
                match = inside[same.index(node)]
                start = left + len(piece[: match.start()].encode())
                end = start + len(wanted.encode())
        else:
            start, end = self.span(node)
        self.edits.append((start, end, text))

    def renamed_definition(self, node, new):
        """The name in `def name` or `class name`."""
        start, end = self.span(node)
        head = self.data[start:end]
        match = re.match(rb"(?:async\s+)?(?:def|class)\s+(" + node.name.encode() + rb")\b", head)
        self.edits.append((start + match.start(1), start + match.end(1), new))

    def result(self):
        data, edits, last = self.data, [], None
        for edit in sorted(set(self.edits), key=lambda e: (e[0], e[1])):
            if last is not None and edit[0] < last[1]:
                if edit[:2] == last[:2] and edit[2] == last[2]:
                    continue
                raise ValueError(f"{self.where}: edits overlap: {edits[-1]} {edit} {data[edit[0]-30:edit[1]+30]!r}")
            edits.append(edit)
            last = edit
        for start, end, text in reversed(edits):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()


def _in_braces(text, place):
    depth, n = 0, 0
    while n < place:
        if text[n] in "{}" and text[n : n + 2] in ("{{", "}}") and depth == 0:
            n += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[n], 0)
        n += 1
    return depth > 0
