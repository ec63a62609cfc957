#!/usr/bin/env bash
# Write the constraints file: the versions that pip picks today, in an empty environment, for
# everything that pyproject.toml asks for. Without the GPU extra: it excludes the CPU's.
#
#   tools/lock.sh FILE PYTHON...     the first PYTHON that is 3.11 or newer is taken
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=$1
shift
for python in "$@"; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
  python=
done
[ -n "${python:-}" ] || { echo "lock: Python 3.11 or newer is needed" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
pip() { "$scratch/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet --upgrade pip
pip install --quiet --editable '.[audio,avro,claims,cpu,demo,extensions,image,jwt,local-kafka,report,store,text]' --group test --group lint --group train
{
  echo "# Constraints: the versions that setup and CI install. Written by 'make lock'."
  pip freeze --all --exclude-editable | grep -v -i -E '^(setuptools|wheel)=='
} >"$scratch/lock"
mv "$scratch/lock" "$lock"
echo "lock: $(grep -c == "$lock") versions in $lock"
