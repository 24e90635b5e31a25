"""Dump, for every function of the package, what each global name in it means: PYTHONPATH=src python globals_of.py OUT.json"""
import builtins, dis, importlib, json, pkgutil, re, sys, types
import camscope

def describe(value):
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if isinstance(name, str) and isinstance(module, str):
        return ["object", module, name]
    if isinstance(value, (str, int, float, bool, tuple, frozenset, type(None), bytes)):
        return ["value", re.sub(r" at 0x[0-9a-f]+| of type object", "", repr(value))[:2000]]
    return ["type", type(value).__module__ + "." + type(value).__qualname__]

def codes(code):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes(const)

out = {}
for info in pkgutil.walk_packages(camscope.__path__, "camscope."):
    if info.name.endswith("__main__"):
        continue
    module = importlib.import_module(info.name)
    if isinstance(module, types.ModuleType) and module.__file__:
        source = open(module.__file__).read()
        table = out.setdefault(info.name, {})
        for top in codes(compile(source, module.__file__, "exec")):
            if top.co_name == "<module>":
                continue
            for op in dis.get_instructions(top):
                if op.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF"):
                    name = op.argval
                    if op.opname == "LOAD_NAME" and name not in vars(module) and not hasattr(builtins, name):
                        continue
                    if name in ("__name__", "__file__", "__annotations__"):
                        continue
                    if name in vars(module):
                        meaning = describe(vars(module)[name])
                    elif hasattr(builtins, name):
                        meaning = ["builtin", name]
                    else:
                        meaning = ["MISSING"]
                    table.setdefault(top.co_qualname, {})[name] = meaning
json.dump(out, open(sys.argv[1], "w"))
