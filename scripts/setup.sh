#!/usr/bin/env bash
# Make .venv in the checkout with everything that running (or, with "dev", also testing) Rung needs. Repeat at will: it does
# nothing while the requirement files stay the same.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-run}
python=${PYTHON:-python3}
stamp=.venv/.installed-$kind
wanted=$(cat requirements.txt requirements-dev.txt scripts/setup.sh | cksum)

if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "error: Rung needs Python 3.11 or newer; name one with PYTHON=python3.12 make …" >&2; exit 2; }
case $kind in run) size=1.1 ;; *) size=2.2 ;; esac
echo "setting up .venv ($kind): up to $size GB, more with CUDA; the first time takes some minutes …" >&2

# A torch that the machine already has (a GPU image, say) is kept: its CUDA fits the driver.
has_torch='import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); raise SystemExit(not (2, 11) <= v < (2, 14))'
if "$python" -c "$has_torch" 2>/dev/null; then options=--system-site-packages; else options=; fi
[ -x .venv/bin/python ] || "$python" -m venv $options .venv
# --no-compile: Python compiles what is imported, a fraction of all files, when it is
install() { .venv/bin/python -m pip --disable-pip-version-check install -q --no-compile "$@"; }

if ! .venv/bin/python -c "$has_torch" 2>/dev/null; then
  device=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)} # a container is built where there may be no GPU
  if [ "$device" = cuda ]; then
    install 'torch==2.11.*'
  else # without a GPU: the CPU build, from where pip looks anyway or from PyTorch's own index; gigabytes of CUDA only as the last resort
    install 'torch==2.13.0+cpu' 2>/dev/null ||
      install 'torch==2.13.0+cpu' --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
      install 'torch==2.13.0'
  fi
fi
install -r requirements.txt
[ "$kind" = run ] || install -r requirements-dev.txt
echo "$wanted" >"$stamp"
