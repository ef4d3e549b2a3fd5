"""Writes a bill of materials (CycloneDX 1.6, JSON) of a kvrouter binary to stdout.

It lists the Go modules named in the binary, the crates of native/ compiled for its
target, and the linked Rust, Go and C libraries. The output is reproducible.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import uuid


def output(*command):
    """The output of a command."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def go_modules(binary):
    """The Go version, the main module, and one component for each module that is linked in."""
    go, main, found = "", ("kvrouter", ""), []
    for line in output("go", "version", "-m", binary).splitlines():
        fields = line.split("\t")
        if line.startswith(binary):
            go = line.rsplit(" ", 1)[1]
        elif len(fields) > 3 and fields[1] == "mod":
            main = fields[2], fields[3]
        elif len(fields) > 3 and fields[1] == "dep":
            # h1: sums are specific to Go; CycloneDX has no name for them.
            sums = [{"name": "go:sum", "value": fields[4]}] if len(fields) > 4 and fields[4] else []
            found.append(component(fields[2], fields[3], f"pkg:golang/{fields[2]}@{fields[3]}", properties=sums))
    return go, main, found


def crates(native, target):
    """One component for each crate that is compiled for the target; build scripts and macros of it included."""
    manifest = os.path.join(native, "Cargo.toml")
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target, "--manifest-path", manifest))
    with open(os.path.join(native, "Cargo.lock"), "rb") as file:
        sums = {(p["name"], p["version"]): p.get("checksum") for p in tomllib.load(file)["package"]}
    packages = {p["id"]: p for p in metadata["packages"]}
    nodes = {n["id"]: n for n in metadata["resolve"]["nodes"]}
    reached, todo = set(), [metadata["resolve"]["root"]]
    while todo:
        at = todo.pop()
        if at in reached:
            continue
        reached.add(at)
        todo += [d["pkg"] for d in nodes[at]["deps"] if any(k["kind"] != "dev" for k in d["dep_kinds"])]
    found = []
    for at in reached - {metadata["resolve"]["root"]}:
        name, version, licence = (packages[at][key] for key in ("name", "version", "license"))
        digest = sums.get((name, version))
        found.append(component(name, version, f"pkg:cargo/{name}@{version}", licence=licence, sha256=digest))
    return found


def libc_version():
    """The version of the C library that this machine links."""
    match = re.search(r"(\d+\.\d+)\s*$", output("ldd", "--version").splitlines()[0])
    return match.group(1) if match else "unknown"


def component(name, version, purl, licence=None, sha256=None, properties=()):
    """One library of the list."""
    entry = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if sha256:
        entry["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    if licence:
        entry["licenses"] = [{"expression": licence.replace("/", " OR ")}]
    if properties:
        entry["properties"] = list(properties)
    return entry


def main():
    """Parses the command line and prints the bill of materials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, help="the built program")
    parser.add_argument("--native", required=True, help="the folder of the Rust crate")
    parser.add_argument("--target", required=True, help="the Rust target it was built for")
    parser.add_argument("--commit", required=True)
    given = parser.parse_args()

    go, (name, version), modules = go_modules(given.binary)
    rust = output("rustc", "--version").split()[1]
    linked = [
        component("std", go.removeprefix("go"), f"pkg:golang/std@{go.removeprefix('go')}", licence="BSD-3-Clause"),
        component("rust-std", rust, f"pkg:generic/rust-std@{rust}", licence="MIT OR Apache-2.0"),
        component("glibc", libc_version(), f"pkg:generic/glibc@{libc_version()}", licence="LGPL-2.1-or-later"),
    ]
    parts = sorted(modules + crates(given.native, given.target) + linked, key=lambda c: c["purl"])
    with open(given.binary, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    made = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.UTC)
    purl = f"pkg:generic/{name}@{version}"
    json.dump({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application", "bom-ref": purl, "name": name, "version": version, "purl": purl,
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "properties": [{"name": "commit", "value": given.commit}, {"name": "target", "value": given.target}],
            },
        },
        "components": parts,
        "dependencies": [{"ref": purl, "dependsOn": [part["purl"] for part in parts]}],
    }, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
