#!/bin/sh
# Makes .venv with every pinned dependency. Needs Python 3.11+ and a package index; as root it installs what Debian left out of it.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "$python is older than 3.11; set PYTHON=/path/to/python3.11 or newer" >&2; exit 2; }
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
  else
    echo "$python has no venv module; install it (Debian: apt-get install python3-venv)" >&2; exit 2
  fi
fi
echo "python environment: .venv from requirements/dev.lock"
[ -x .venv/bin/python ] || { rm -rf .venv; "$python" -m venv .venv; }
pinned=$(sed -n 's/^\(uv==[^ ;]*\).*/\1/p' requirements/dev.lock)
[ -x .venv/bin/uv ] || .venv/bin/python -m pip install -q --disable-pip-version-check "$pinned"
.venv/bin/uv pip sync -q --python .venv/bin/python requirements/dev.lock
.venv/bin/uv pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e engine -e operator
# What Mooncake's programs, the store of prefixes, are linked with; everything else runs without.
.venv/bin/python -c 'import mooncake.store' 2>/dev/null || {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libibverbs1 libnuma1 libcurl4 >/dev/null
  else
    echo "the prefix store's tests need libibverbs1, libnuma1 and libcurl4; install them" >&2
  fi
}
