"""A Hub on the loopback interface: what a push and a load ask of huggingface.co for models, in memory, with faults.

The real client talks to it over HTTP. It is strict where a mistake of ours would hide: large files are hashed when they
arrive and a commit may only name those that did, a commit is checked whole before the branch moves, `parentCommit` must be
the head, a token may write only to its own user, a card must be one that the Hub takes. Faults on demand,
`hub.fault("503", path="commit")`, each used up when it has struck:

    503          the request is refused as by a busy server
    401          the request is refused as by an expired token
    cut          half of the body is read, then the connection is closed
    cut after    the request is carried out, then the connection is closed without an answer
    damage       a byte of the body changes on its way in (PUT)

Not proven here: quotas, the server's code for cards, Xet."""

import base64
import dataclasses
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_loopback"
USER = "tester"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = []
LICENSES = {"apache-2.0", "mit", "afl-3.0", "cc-by-nc-4.0", "gemma", "llama3.2", "other"}
TASKS = {
    "text-generation", "image-classification", "image-feature-extraction", "text-to-image", "text-to-video",
    "unconditional-image-generation", "other",
}  # fmt: skip
FRONT = re.compile(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", re.DOTALL)
PATTERNS = {  # key of the front matter -> what its text, or every text in its list, must look like
    "library_name": r"[a-z0-9][a-z0-9_.-]*",
    "base_model": r"\w[\w.-]*/\w[\w.-]*",
    "language": r"[a-z]{2,3}|multilingual|code",
}


def refusals(text, licenses=LICENSES):
    """What the server would say against a card (the Hub's documentation, "Model Cards"); empty for one that it takes."""
    front = FRONT.match(text)
    data = yaml.safe_load(front[1]) if front else None
    if not isinstance(data, dict):
        return ["front matter is missing or no object"]
    found = [f'"{key}" is not allowed to be empty' for key, value in data.items() if value in (None, "", [])]
    if data.get("license", "mit") not in licenses:
        found.append(f'"license" must be one of {sorted(licenses)}')
    if data.get("license") == "other" and not data.get("license_name"):
        found.append('"license_name" is required')
    for key, pattern in PATTERNS.items():
        value = data.get(key)
        for entry in value if isinstance(value, list) else [value] * (value is not None):
            if not isinstance(entry, str) or not re.fullmatch(pattern, entry):
                found.append(f'"{key}": {entry!r} fails to match the required pattern {pattern}')
    results = [result for model in data.get("model-index", []) for result in model["results"]]
    if not {data.get("pipeline_tag", "other"), *(result["task"]["type"] for result in results)} <= TASKS:
        found.append(f'"pipeline_tag" must be one of {sorted(TASKS)}')
    values = [metric["value"] for result in results for metric in result["metrics"]]
    return found + ['"model-index": a metric has no value'] * (not all(isinstance(v, int | float) for v in values))


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of a commit."""

    data: bytes
    lfs: bool

    @property
    def sha256(self):
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob(self):
        """git's name of the file, or of its LFS pointer."""
        data = self.data
        if self.lfs:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(data)}\n".encode()
        return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@dataclasses.dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict


@dataclasses.dataclass
class Repo:
    """refs: "refs/heads/main", "refs/tags/v1", "refs/pr/1" -> commit id. lfs: sha256 -> bytes, arrived whole."""

    name: str
    private: bool
    commits: dict = dataclasses.field(default_factory=dict)
    refs: dict = dataclasses.field(default_factory=dict)
    lfs: dict = dataclasses.field(default_factory=dict)

    def add(self, ref, parent, title, files):
        content = json.dumps([self.name, ref, parent, title, len(self.commits)]).encode()
        commit = Commit(hashlib.sha1(content).hexdigest(), parent, title, files)
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit

    def find(self, revision):
        """The commit of a branch, tag, full ref or commit id; None when there is none."""
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in self.refs:
                return self.commits[self.refs[name]]
        return self.commits.get(revision)

    def files(self, revision="main"):
        """path -> bytes at a revision."""
        return {path: entry.data for path, entry in self.find(revision).files.items()}


@dataclasses.dataclass
class Fault:
    kind: str
    path: str
    method: str | None
    skip: int
    times: int


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status, message, code=None, commit=None):
        super().__init__(message)
        self.status, self.code, self.commit = status, code, commit


class LoopbackHub:
    """`with LoopbackHub() as hub:` serves at `hub.endpoint` until the block ends.

    tokens: token -> user who may write below that name. licenses: those that it knows. log: (method, path, bytes of the
    body) of every request that arrived, whole or not. Files above 100 kB, and those that are no text, are large files.
    """

    def __init__(self):
        self.tokens = {TOKEN: USER}
        self.repos, self.faults, self.log = {}, [], []
        self.licenses = LICENSES
        self.lock = threading.RLock()

    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home):
        """Variables that make a process use this Hub, with its own Hugging Face home."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def fault(self, kind, path="", method=None, skip=0, times=1):
        """The next `times` requests whose method and path (a regular expression) fit fail, after `skip` that do not."""
        self.faults.append(Fault(kind, path, method, skip, times))

    def strike(self, method, path):
        """The kind of fault that this request meets, or None."""
        with self.lock:
            for fault in self.faults:
                if fault.method in (None, method) and re.search(fault.path, path):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    if not fault.times:
                        self.faults.remove(fault)
                    return fault.kind
        return None

    def put(self, name, files, private=False):
        """A repository with these files (path -> bytes) in one commit, as if somebody had pushed it."""
        repo = self.repos.setdefault(name, Repo(name, private))
        entries = {path: Entry(data, is_large(path, data[:512], len(data))) for path, data in files.items()}
        repo.lfs.update({entry.sha256: entry.data for entry in entries.values() if entry.lfs})
        head = repo.refs.get("refs/heads/main")
        return repo.add("refs/heads/main", head, "put", entries).oid

    def sent(self, method, path):
        """How many requests fit."""
        return sum(1 for made, where, _ in self.log if made == method and re.search(path, where))


def route(method, pattern):
    def keep(function):
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return keep


def is_large(path, sample, size):
    text = not path.endswith(".safetensors") and b"\0" not in sample
    return size > 100_000 or not text


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet: two would wait for each other, 40 ms a request
    disable_nagle_algorithm = True
    hub = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def serve(self):
        where = unquote(urlsplit(self.path).path)
        method = "GET" if self.command == "HEAD" else self.command
        fault = self.hub.strike(self.command, where)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2 if fault == "cut" else length)
        self.hub.log.append((self.command, where, len(body)))
        if fault == "cut":
            self.close_connection = True
            return
        if fault == "damage" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        try:
            if fault == "503":
                raise Refused(503, "Service Unavailable")
            if fault == "401":
                raise Refused(401, "Invalid credentials in Authorization header")
            status, headers, answer = self.answer(method, where, body)
        except Refused as refused:
            status, headers = refused.status, {"X-Error-Message": str(refused)}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            if refused.commit:
                headers["X-Repo-Commit"] = refused.commit
            answer = json.dumps({"error": str(refused), "url": self.hub.endpoint}).encode()
        if fault == "cut after":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def answer(self, method, where, body):
        """(status, headers, body) from the function of the first route that fits."""
        for wanted, pattern, function in ROUTES:
            found = pattern.fullmatch(where)
            if wanted == method and found:
                with self.hub.lock:
                    given = function(self, body, **found.groupdict())
                return given if isinstance(given, tuple) else (200, {}, json.dumps(given).encode())
        raise Refused(404, f"no such endpoint: {method} {where}")

    @property
    def user(self):
        """Who asks; None without a token. A token that is not known is refused, as by the Hub."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    @property
    def query(self):
        return {key: values[-1] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def repo(self, name, write=False):
        """The repository, where this user may see it (and write to it)."""
        user, repo = self.user, self.hub.repos.get(name)
        if repo is None or (repo.private and user != name.split("/")[0]):
            raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and user is None:
            raise Refused(401, "Invalid username or password.")
        if write and user != name.split("/")[0]:
            raise Refused(403, f"You don't have the rights to write to {name}")
        return repo

    def commit(self, repo, revision):
        found = repo.find(revision)
        if found is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found


@route("GET", "/api/whoami-v2")
def whoami(ask, body):
    if ask.user is None:
        raise Refused(401, "Invalid username or password.")
    return {"type": "user", "name": ask.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}}


@route("POST", "/api/validate-yaml")
def validate_yaml(ask, body):
    errors = [{"message": message} for message in refusals(json.loads(body)["content"], ask.hub.licenses)]
    status = 400 if errors else 200
    return status, {"Content-Type": "application/json"}, json.dumps({"errors": errors, "warnings": []}).encode()


@route("POST", "/api/repos/create")
def create_repo(ask, body):
    asked = json.loads(body)
    owner = asked.get("organization") or ask.user
    if ask.user is None:
        raise Refused(401, "Invalid username or password.")
    if owner != ask.user:
        raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")
    name = f"{owner}/{asked['name']}"
    url = {"url": f"{ask.hub.endpoint}/{name}", "name": name}
    if name in ask.hub.repos:
        return 409, {}, json.dumps({**url, "error": "You already created this model repo"}).encode()
    repo = ask.hub.repos[name] = Repo(name, asked.get("visibility") == "private")
    repo.add("refs/heads/main", None, "initial commit", {".gitattributes": Entry(b"*.safetensors filter=lfs\n", False)})
    return url


@route("DELETE", "/api/repos/delete")
def delete_repo(ask, body):
    asked = json.loads(body)
    name = f"{asked.get('organization') or ask.user}/{asked['name']}"
    ask.repo(name, write=True)
    del ask.hub.repos[name]
    return {}


@route("GET", f"/api/models/{REPO}(?:/revision/(?P<revision>.+))?")
def model_info(ask, body, repo, revision):
    found = ask.repo(repo)
    commit = ask.commit(found, revision or "main")
    siblings = [{"rfilename": path} for path in commit.files]
    return {
        "_id": repo, "id": repo, "modelId": repo, "sha": commit.oid, "private": found.private, "siblings": siblings,
        "tags": [], "downloads": 0, "likes": 0, "gated": False, "disabled": False,
    }  # fmt: skip


def listed(path, entry):
    shown = {"type": "file", "oid": entry.blob, "size": len(entry.data), "path": path}
    if entry.lfs:
        shown["lfs"] = {"oid": entry.sha256, "size": len(entry.data), "pointerSize": 130}
    return shown


@route("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+|refs/[^/]+/[^/]+)(?:/(?P<folder>.+))?")
def tree(ask, body, repo, revision, folder):
    commit = ask.commit(ask.repo(repo), revision)
    inside = f"{folder}/" if folder else ""
    below = {path: entry for path, entry in commit.files.items() if path.startswith(inside)}
    if folder and not below:
        raise Refused(404, f"{folder} does not exist", "EntryNotFound", commit.oid)
    if ask.query.get("recursive", "").lower() in ("true", "1"):
        return [listed(path, entry) for path, entry in below.items()]
    raise Refused(400, "only recursive listings here")


@route("GET", f"/api/models/{REPO}/refs")
def refs(ask, body, repo):
    shown = {"heads": [], "tags": [], "pr": []}
    for ref, oid in ask.repo(repo).refs.items():
        kind, name = ref.removeprefix("refs/").split("/", 1)
        shown[kind].append({"name": name, "ref": ref, "targetCommit": oid})
    return {"branches": shown["heads"], "tags": shown["tags"], "converts": [], "pullRequests": shown["pr"]}


@route("POST", f"/api/models/{REPO}/tag/(?P<revision>.+)")
def create_tag(ask, body, repo, revision):
    found = ask.repo(repo, write=True)
    ref = f"refs/tags/{json.loads(body)['tag']}"
    if ref in found.refs:
        raise Refused(409, "Reference already exists")
    found.refs[ref] = ask.commit(found, revision).oid
    return {}


@route("POST", f"/api/models/{REPO}/branch/(?P<branch>.+)")
def create_branch(ask, body, repo, branch):
    found = ask.repo(repo, write=True)
    if f"refs/heads/{branch}" in found.refs:
        raise Refused(409, "Reference already exists")
    found.refs[f"refs/heads/{branch}"] = ask.commit(found, json.loads(body or b"{}").get("startingPoint", "main")).oid
    return {}


@route("POST", f"/api/models/{REPO}/preupload/(?P<revision>.+)")
def preupload(ask, body, repo, revision):
    found = ask.repo(repo, write="create_pr" not in ask.query)
    commit, asked = ask.commit(found, revision), json.loads(body)
    ignore = asked.get("gitIgnore")
    if ignore is None and ".gitignore" in commit.files:
        ignore = commit.files[".gitignore"].data.decode()
    answer = []
    for file in asked["files"]:
        path, known = file["path"], commit.files.get(file["path"])
        large = is_large(path, base64.b64decode(file["sample"]), file["size"])
        entry = {"path": path, "uploadMode": "lfs" if large else "regular"}
        entry["shouldIgnore"] = path in (ignore or "").splitlines()
        if known is not None:
            entry["oid"] = known.sha256 if known.lfs else known.blob
        answer.append(entry)
    return {"files": answer}


@route("POST", f"/{REPO}.git/info/lfs/objects/batch")
def lfs_batch(ask, body, repo):
    found = ask.repo(repo, write=ask.user is None or ask.user == repo.split("/")[0])
    answer = []
    for asked in json.loads(body)["objects"]:
        shown = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in found.lfs:
            place = f"{ask.hub.endpoint}/storage/{repo}/{asked['oid']}"
            upload = {"href": place, "header": {}}
            shown["actions"] = {"upload": upload}
        answer.append(shown)
    return {"transfer": "basic", "objects": answer}


@route("PUT", f"/storage/{REPO}/(?P<oid>[0-9a-f]{{64}})")
def store(ask, body, repo, oid):
    if hashlib.sha256(body).hexdigest() != oid:
        raise Refused(400, "BadDigest: the content does not match its sha256")
    ask.hub.repos[repo].lfs[oid] = body
    return {}


@route("POST", f"/api/models/{REPO}/commit/(?P<revision>.+)")
def create_commit(ask, body, repo, revision):
    request = ask.query.get("create_pr") == "1"
    found = ask.repo(repo, write=not request)
    if ask.user is None:
        raise Refused(401, "Invalid username or password.")
    head = ask.commit(found, revision)
    lines = [json.loads(line) for line in body.splitlines()]
    header, files = lines[0]["value"], dict(head.files)
    if header.get("parentCommit") not in (None, head.oid):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    for line in lines[1:]:
        key, value = line["key"], line["value"]
        if key == "file":
            files[value["path"]] = Entry(base64.b64decode(value["content"], validate=True), False)
        elif key == "lfsFile":
            if value["oid"] not in found.lfs:
                raise Refused(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
            files[value["path"]] = Entry(found.lfs[value["oid"]], True)
        elif key == "deletedFile" and value["path"] in files:
            del files[value["path"]]
        else:
            raise Refused(400, f"{key}: {value} cannot be carried out")
    number = sum(ref.startswith("refs/pr/") for ref in found.refs) + 1
    ref = f"refs/pr/{number}" if request else f"refs/heads/{revision}"
    oid = found.add(ref, head.oid, header["summary"], files).oid
    answer = {"success": True, "commitOid": oid, "commitUrl": f"{ask.hub.endpoint}/{repo}/commit/{oid}"}
    if request:
        answer["pullRequestUrl"] = f"{ask.hub.endpoint}/{repo}/discussions/{number}"
    return answer


@route("GET", f"/{REPO}/resolve/(?P<revision>[^/]+|refs/[^/]+/[^/]+)/(?P<path>.+)")
def resolve(ask, body, repo, revision, path):
    commit = ask.commit(ask.repo(repo), revision)
    entry = commit.files.get(path)
    if entry is None:
        raise Refused(404, "Entry not found", "EntryNotFound", commit.oid)
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.blob}"', "Accept-Ranges": "bytes"}
    if not entry.lfs:
        return 200, headers, entry.data
    headers["X-Linked-ETag"], headers["X-Linked-Size"] = f'"{entry.sha256}"', str(len(entry.data))
    headers["Location"] = f"http://localhost:{ask.hub.port}/cdn/{repo}/{entry.sha256}"
    return 302, headers, b""


@route("GET", f"/cdn/{REPO}/(?P<oid>[0-9a-f]{{64}})")
def download(ask, body, repo, oid):
    if ask.headers.get("Authorization"):
        raise Refused(400, "a token must not be sent to another host")
    return 200, {"ETag": f'"{oid}"'}, ask.hub.repos[repo].lfs[oid]
