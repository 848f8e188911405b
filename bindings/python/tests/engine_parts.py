"""What stands in for the parts of an engine that are compiled, or import all of it: shared by the `engine_*.py`
programs."""

import importlib.abc
import importlib.machinery
import sys
import types


class Kind(type):
    """Classes that have whatever attribute they are asked for."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()


class Stub(metaclass=Kind):
    """Whatever a module that is not there is asked for."""

    def __init__(self, *_words, **_named):
        pass

    def __init_subclass__(cls, **_named):
        """Whatever a class is derived with."""

    def __call__(self, *given, **_named):
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __class_getitem__(cls, _item):
        return cls


class Absent(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Kind(name, (Stub,), {}))
        return vars(self)[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Bare packages in place of an engine's, whose `__init__` imports the whole of it; stubs of what is named, but for
    what is one of `real`."""

    def __init__(self, root, bare, stubbed, real=()):
        self.root, self.bare, self.stubbed, self.real = root, bare, stubbed, real
        self.used = []

    def find_spec(self, name, path=None, target=None):
        if name in self.real:
            return None
        if name in self.bare or any(name == stub or name.startswith(f"{stub}.") for stub in self.stubbed):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        self.used.append(spec.name)
        return (types.ModuleType if spec.name in self.bare else Absent)(spec.name)

    def exec_module(self, module):
        module.__path__ = [str(self.root.joinpath(*module.__name__.split(".")))] if module.__name__ in self.bare else []

    def install(self):
        sys.meta_path.insert(0, self)
        sys.path.insert(0, str(self.root))
