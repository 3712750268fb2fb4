#!/usr/bin/env bash
# Builds the release, and tries it as users get it: in empty environments.
#
#     scripts/check_release.sh 2.13.0 2.14.1        versions of torch
#
# Each gets the source archive, and then the wheel in its place. Of 2.14.1 the package index
# has the CUDA build, whose packages take 5 GB. What cannot be downloaded in time is
# said, and left out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m hatchling build --directory "$folder/dist" >/dev/null
cd "$folder" # where no package of the checkout is found
for torch in "$@"; do
    "$python" -m venv "$torch"
    if ! timeout 600 "$torch/bin/pip" install --quiet "torch==$torch" ||
        ! timeout 120 "$torch/bin/pip" install --quiet dist/*.tar.gz; then
        echo "torch $torch: packages could not be downloaded; not tried"
        continue
    fi
    for release in dist/*.tar.gz dist/*.whl; do
        "$torch/bin/pip" install --quiet --no-deps --force-reinstall "$release"
        "$torch/bin/hocket" --version
        "$torch/bin/hocket" check 1f1b --devices 2 --microbatches 4
        "$torch/bin/hocket" draw zb-h1 --devices 2 --microbatches 4 -o "$torch.html"
        "$torch/bin/hocket" plan bert-24 --devices 2 --hardware v100-32g >/dev/null
        timeout 120 "$torch/bin/hocket" doctor --prove --workers 2
        echo "torch $torch: $release works"
    done
done
