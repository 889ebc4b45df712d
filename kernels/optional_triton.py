"""Triton if it is installed, else placeholders: a module that defines kernels can then be imported, but not launch them."""

__all__ = ["tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Missing:
        """Replaces each module, decorator, type and kernel. Launching it raises ImportError."""

        def __getattr__(self, name: str) -> "_Missing":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: object, **options: object) -> "_Missing":
            return self

        def __getitem__(self, grid: object) -> "_Missing":
            raise ImportError("GPU kernels need Triton; pip install triton")

    triton = tl = _Missing()
