"""Hold what global names mean before and after the move against each other: python compare_globals.py OLD.json NEW.json MAPPING.json"""
import json, sys
old, new, mapping = (json.load(open(p)) for p in sys.argv[1:4])
def dotted(p):
    parts = ["camscope", *p.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
to = {dotted(o): dotted(n) for n, os in mapping.items() if not n.startswith("#") for o in os}
ren = {(dotted(k.split(":")[0]), k.split(":")[1]): v for k, v in mapping["#renames"].items()}
loc = {}
bad = missing = checked = 0
def qual(m, q):
    head, dot, rest = q.partition(".")
    return ren.get((m, head), head) + dot + rest
def meaning(d):
    if d[0] == "module":
        return ["module", to.get(d[1], d[1])]
    if d[0] == "object":
        return ["object", to.get(d[1], d[1]), qual(d[1], d[2])]
    if d[0] == "type":
        h, _, t = d[1].rpartition(".")
        return ["type", to.get(h, h) + "." + qual(h, t)]
    return d
def flat(d):
    return json.dumps(meaning(d))
for m, functions in old.items():
    there = new.get(to.get(m), {})
    for q, names in functions.items():
        found = there.get(qual(m, q))
        if found is None:
            missing += 1
            print("no function", m, q)
            continue
        seen = {json.dumps(v) for v in found.values()}
        for name, d in names.items():
            checked += 1
            want = meaning(d)
            if want[0] == "module" and want[1] == to.get(m):
                continue
            for key in (name, ren.get((m, name))):
                if key in found and json.dumps(found[key]) == json.dumps(want):
                    break
            else:
                if json.dumps(want) not in seen and not (want[0] == "value" and "camscope" in want[1]):
                    bad += 1
                    print("DIFFERENT", m, q, name, want, "now", found.get(name) or [v for k, v in found.items() if k == ren.get((m, name))])
        for name, d in found.items():
            if d == ["MISSING"]:
                bad += 1
                print("MISSING", to[m], q, name)
print(checked, "uses,", bad, "different,", missing, "functions not found")
