"""Runs the examples, or those that are named: ``python bindings/python/examples [NAME]...``"""

import importlib
import importlib.util
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
if importlib.util.find_spec("fmha") is None:
    sys.path.insert(0, str(HERE.parent))  # a checkout, where nothing is installed
sys.path.insert(0, str(HERE))

EXAMPLES = ["first_call", "train", "generate", "packed", "fp8", "serve", "rollout"]


def main(names):
    unknown = [name for name in names if name not in EXAMPLES]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: the examples are {', '.join(EXAMPLES)}")
    for name in names or EXAMPLES:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        importlib.import_module(name).main()
        print(f"   {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
