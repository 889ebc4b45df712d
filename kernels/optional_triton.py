"""Triton where it is installed. Elsewhere stand-ins: a module that defines kernels can be imported, but launches none."""

__all__ = ["tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Missing:
        """Stands for each module, decorator, type and kernel."""

        def __getattr__(self, name: str) -> "_Missing":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: object, **options: object) -> "_Missing":
            return self

        def __getitem__(self, grid: object) -> "_Missing":
            raise ImportError("a kernel for GPUs needs Triton; pip install triton")

    triton = tl = _Missing()
