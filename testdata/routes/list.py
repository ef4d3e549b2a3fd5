"""Prints the HTTP routes of an engine's server: python testdata/routes/list.py vllm|sglang.

Run it with a Python that has the engine. The routes are read from its source, whatever flag enables them.
"""
import ast
import importlib.metadata
import importlib.util
import pathlib
import sys

# Where the source of the server is, and what there belongs to other servers.
SERVERS = {
    "vllm": ("entrypoints", {"cli", "launchers"}),
    "sglang": ("srt/entrypoints", {"engine_info_bootstrap_server.py"}),
}
METHODS = {"get", "post", "put", "delete", "patch", "head", "options", "websocket"}
# Paths of no routes of their own: those that another line adds, a page of FastAPI, and a page that only an
# environment variable adds.
COMPUTED = {"route.path", "app.swagger_ui_oauth2_redirect_url", "_ollama_root_route"}


def constant(node):
    """Returns the value of an expression, or of its default where the environment may have another one."""
    text = ast.unparse(node)
    if text.startswith("os.environ.get(") and len(node.args) == 2:
        return constant(node.args[1])
    return None if text in COMPUTED else ast.literal_eval(node)


def routes_of(tree):
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        owner, _, verb = ast.unparse(call.func).rpartition(".")
        if verb == "Mount" or owner == "app" and verb == "mount":
            methods = ["GET"]
        elif not owner.endswith(("app", "router")):
            continue
        elif verb in METHODS:
            methods = [verb.upper()]
        elif verb in ("api_route", "add_api_route"):
            methods = [k.value for k in call.keywords if k.arg == "methods"][0]
            methods = constant(methods) if constant(call.args[0]) else []
        else:
            continue
        if path := constant(call.args[0]):
            yield from ((path, method) for method in methods)


engine = sys.argv[1]
folder, others = SERVERS[engine]
root = pathlib.Path(importlib.util.find_spec(engine).origin).parent / folder
found = set()
for file in root.rglob("*.py"):
    if not others & set(file.relative_to(root).parts):
        try:
            found.update(routes_of(ast.parse(file.read_text())))
        except ValueError as problem:
            sys.exit(f"{file}: a path cannot be read: {problem}")
version = importlib.metadata.version(importlib.metadata.packages_distributions()[engine][0])
print(f"# {engine} {version}: python testdata/routes/list.py {engine}")
for path, method in sorted(found):
    print(method, path)
