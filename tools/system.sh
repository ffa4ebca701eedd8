#!/bin/sh
# Installs OpenBLAS (fast prefill) and Chromium (browser test) from Debian's packages where that is allowed.
# Where it is not, nothing fails: the demo takes fewer tokens and the browser test is skipped, and both say so.
[ "$(uname -s)" = Linux ] || exit 0
want=
ls /usr/lib/*/libopenblas.so.0 >/dev/null 2>&1 || want="$want libopenblas0"
command -v chromium >/dev/null 2>&1 || want="$want chromium"
[ -n "$want" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then echo "not installed (no apt-get):$want"; exit 0; fi
if [ "$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo="sudo -n"; else echo "not installed (not root):$want"; exit 0; fi
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q >/dev/null 2>&1
for p in $want; do $sudo apt-get install -y -q --no-install-recommends "$p" >/dev/null 2>&1 || echo "could not install $p"; done
exit 0
