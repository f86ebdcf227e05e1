#!/bin/sh
# The steps of the Dockerfile, apart, so that they can be run (and are tested) without a container engine.
#   image.sh build DIST             the wheel into DIST
#   image.sh install DIST PYTHON    torch and the wheel into PYTHON's environment; TORCH, TORCH_INDEX, EXTRA, PIP_ARGS
set -eu
case "$1" in
  build)
    cd "$(dirname "$0")/.."
    "${PYTHON:-python}" -m pip wheel --disable-pip-version-check --no-deps --wheel-dir "$2" ${PIP_ARGS:-} .
    ;;
  install)
    wheel=$(ls "$2"/sglite-*.whl)
    if [ -n "${TORCH:-}" ]; then
      "$3" -m pip install --disable-pip-version-check --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
    fi
    "$3" -m pip install --disable-pip-version-check --no-cache-dir ${PIP_ARGS:-} "$wheel${EXTRA:+[$EXTRA]}"
    ;;
  *)
    sed -n '2,4p' "$0"
    exit 2
    ;;
esac
