"""A Hub in memory on the loopback interface, with the endpoints that loading and pushing use, and with faults.

A fault, such as `hub.fault("503", path="commit")`, affects one request: "503" refuses it, "cut" closes the connection
before it is executed, and "cut after" afterwards.
"""

import base64
import collections
import dataclasses
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback"
USER = "tester"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = []


Entry = collections.namedtuple("Entry", "data oid")  # oid: sha256 of a large file, git's hash of another one
Commit = collections.namedtuple("Commit", "oid parent files")


@dataclasses.dataclass
class Repo:
    name: str
    private: bool
    commits: dict = dataclasses.field(default_factory=dict)  # `Commit` by id
    refs: dict = dataclasses.field(default_factory=dict)  # ids by full name of the ref, such as "refs/heads/main"
    lfs: dict = dataclasses.field(default_factory=dict)  # large files that have arrived, by sha256

    def add(self, ref, parent, files):
        oid = hashlib.sha1(f"{self.name} {ref} {parent} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, files)
        self.refs[ref] = oid
        return oid

    def find(self, revision):
        refs = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return self.commits.get(next((self.refs[ref] for ref in refs if ref in self.refs), revision))

    def files(self, revision="main"):
        return {path: file.data for path, file in self.find(revision).files.items()}


class Refused(Exception):
    def __init__(self, status, message, code="", commit=""):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}


class LoopbackHub:
    """A Hub that serves at `hub.endpoint` inside of `with LoopbackHub() as hub:`."""

    visibility = "public"  # of a new repository for which none is asked

    def __init__(self):
        self.repos, self.faults = {}, []
        self.log = []  # method, path, and bytes of the body of every request
        self.lock = threading.RLock()

    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home):
        """Return the environment of a process that uses this Hub, with `home` as its Hugging Face home."""
        off = {f"HF_HUB_DISABLE_{name}": "1" for name in ("XET", "PROGRESS_BARS", "TELEMETRY")}
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **off}

    def fault(self, kind, path="", skip=0, times=1):
        """Let `times` requests fail whose path matches the regular expression `path`, after `skip` that succeed."""
        self.faults += [(None, path)] * skip + [(kind, path)] * times

    def strike(self, path):
        """Return the fault of the next request, which is used up, or None."""
        with self.lock:
            number = next((n for n, (_, pattern) in enumerate(self.faults) if re.search(pattern, path)), None)
            return None if number is None else self.faults.pop(number)[0]

    def put(self, name, files):
        """Commit `files` (bytes by path) to a repository, which is created if needed."""
        repo = self.repos.setdefault(name, Repo(name, False))
        entries = {path: entry(data, is_large(path, data[:512], len(data))) for path, data in files.items()}
        repo.lfs.update({file.oid: file.data for file in entries.values()})
        return repo.add("refs/heads/main", repo.refs.get("refs/heads/main"), entries)

    def sent(self, method, path):
        """Return the number of requests of a method whose path matches `path`."""
        return sum(logged == method and re.search(path, url) is not None for logged, url, _ in self.log)


def entry(data, large=False):
    blob = f"blob {len(data)}\0".encode() + data
    return Entry(data, hashlib.sha256(data).hexdigest() if large else hashlib.sha1(blob).hexdigest())


def is_large(path, sample, size):
    return size > 100_000 or path.endswith(".safetensors") or b"\0" in sample


def route(method, pattern):
    """Register a function of handler, body, and named groups of `pattern` that returns JSON, or status, headers, bytes."""

    def register(function):
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # sends headers and body in one packet; two would take 40 ms
    disable_nagle_algorithm = True
    hub = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.strike(path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.log.append((self.command, path, len(body)))
        self.close_connection = fault in ("cut", "cut after")
        if fault == "cut":
            return
        try:
            if fault == "503":
                raise Refused(503, "Service Unavailable")
            status, headers, answer = self.answer("GET" if self.command == "HEAD" else self.command, path, body)
        except Refused as refused:
            status, headers, answer = refused.status, refused.headers, json.dumps({"error": str(refused)}).encode()
        if fault == "cut after":
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def answer(self, method, path, body):
        for route_method, pattern, function in ROUTES:
            match = pattern.fullmatch(path)
            if route_method == method and match:
                with self.hub.lock:
                    answer = function(self, body, **match.groupdict())
                return answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
        raise Refused(404, f"no such endpoint: {method} {path}")

    @property
    def user(self):
        return USER if self.headers.get("Authorization") == f"Bearer {TOKEN}" else None

    @property
    def query(self):
        return {key: values[-1] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def may_write(self, owner):
        if self.user != owner:
            raise Refused(403 if self.user else 401, f"You don't have the rights to write below {owner}")

    def repo(self, name, write=False):
        user, owner, repo = self.user, name.split("/")[0], self.hub.repos.get(name)
        if repo is None or (repo.private and user != owner):
            raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        if write:
            self.may_write(owner)
        return repo

    def commit(self, repo, revision):
        commit = repo.find(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit


@route("GET", "/api/whoami-v2")
def whoami(request, body):
    return {"type": "user", "name": request.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}}


@route("POST", "/api/validate-yaml")
def validate_yaml(request, body):
    return {"errors": [], "warnings": []}


@route("POST", "/api/repos/create")
def create_repo(request, body):
    options = json.loads(body)
    owner = options.get("organization") or request.user
    request.may_write(owner or USER)
    name = f"{owner}/{options['name']}"
    url = {"url": f"{request.hub.endpoint}/{name}", "name": name}
    if name in request.hub.repos:
        return 409, {}, json.dumps({**url, "error": "You already created this model repo"}).encode()
    visibility = options.get("visibility", request.hub.visibility)
    repo = request.hub.repos[name] = Repo(name, visibility == "private")
    repo.add("refs/heads/main", None, {".gitattributes": entry(b"*.safetensors filter=lfs\n")})
    return url


@route("DELETE", "/api/repos/delete")
def delete_repo(request, body):
    options = json.loads(body)
    name = f"{options.get('organization') or request.user}/{options['name']}"
    request.repo(name, write=True)
    del request.hub.repos[name]
    return {}


@route("GET", f"/api/models/{REPO}(?:/revision/(?P<revision>.+))?")
def model_info(request, body, repo, revision):
    repository = request.repo(repo)
    commit = request.commit(repository, revision or "main")
    files = [{"rfilename": path} for path in commit.files]
    return {"id": repo, "sha": commit.oid, "private": repository.private, "tags": [], "siblings": files}


@route("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+|refs/[^/]+/[^/]+)(?:/(?P<folder>.+))?")
def tree(request, body, repo, revision, folder):
    commit = request.commit(request.repo(repo), revision)
    below = [(path, file) for path, file in commit.files.items() if path.startswith(f"{folder}/" if folder else "")]
    if folder and not below:
        raise Refused(404, f"{folder} does not exist", "EntryNotFound", commit.oid)
    return [{"type": "file", "oid": file.oid, "size": len(file.data), "path": path} for path, file in below]


@route("GET", f"/api/models/{REPO}/refs")
def refs(request, body, repo):
    named = [(*ref.split("/", 2)[1:], ref, oid) for ref, oid in request.repo(repo).refs.items()]
    of = lambda kind: [{"name": n, "ref": ref, "targetCommit": oid} for k, n, ref, oid in named if k == kind]  # noqa: E731
    return {"branches": of("heads"), "tags": of("tags"), "converts": [], "pullRequests": of("pr")}


@route("POST", f"/api/models/{REPO}/(?P<kind>tag|branch)/(?P<name>.+)")
def create_ref(request, body, repo, kind, name):
    repository = request.repo(repo, write=True)
    options = json.loads(body or b"{}")
    start = name if kind == "tag" else options.get("startingPoint", "main")
    ref = f"refs/tags/{options['tag']}" if kind == "tag" else f"refs/heads/{name}"
    if ref in repository.refs:
        raise Refused(409, "Reference already exists")
    repository.refs[ref] = request.commit(repository, start).oid
    return {}


@route("POST", f"/api/models/{REPO}/preupload/(?P<revision>.+)")
def preupload(request, body, repo, revision):
    commit = request.commit(request.repo(repo, write="create_pr" not in request.query), revision)
    answer = []
    for file in json.loads(body)["files"]:
        existing = commit.files.get(file["path"])
        mode = "lfs" if is_large(file["path"], base64.b64decode(file["sample"]), file["size"]) else "regular"
        oid = existing and existing.oid
        answer.append({"path": file["path"], "uploadMode": mode, "oid": oid, "shouldIgnore": False})
    return {"files": answer}


@route("POST", f"/{REPO}.git/info/lfs/objects/batch")
def lfs_batch(request, body, repo):
    held, items = request.repo(repo).lfs, json.loads(body)["objects"]
    for item in items:
        if item["oid"] not in held:
            item["actions"] = {"upload": {"href": f"{request.hub.endpoint}/storage/{repo}/{item['oid']}", "header": {}}}
    return {"transfer": "basic", "objects": items}


@route("PUT", f"/storage/{REPO}/(?P<oid>[0-9a-f]{{64}})")
def store(request, body, repo, oid):
    request.hub.repos[repo].lfs[oid] = body
    return {}


@route("POST", f"/api/models/{REPO}/commit/(?P<revision>.+)")
def create_commit(request, body, repo, revision):
    is_pull_request = request.query.get("create_pr") == "1"
    repository = request.repo(repo, write=not is_pull_request)
    head = request.commit(repository, revision)
    header, *lines = (json.loads(line) for line in body.splitlines())
    files = dict(head.files)
    if header["value"].get("parentCommit") not in (None, head.oid):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "file":
            files[value["path"]] = entry(base64.b64decode(value["content"], validate=True))
        elif key == "lfsFile" and value["oid"] in repository.lfs:
            files[value["path"]] = entry(repository.lfs[value["oid"]], True)
        elif key == "deletedFile" and value["path"] in files:
            del files[value["path"]]
        else:
            raise Refused(400, f"{key}: {value} cannot be carried out")
    number = sum(ref.startswith("refs/pr/") for ref in repository.refs) + 1
    oid = repository.add(f"refs/pr/{number}" if is_pull_request else f"refs/heads/{revision}", head.oid, files)
    answer = {"success": True, "commitOid": oid, "commitUrl": f"{request.hub.endpoint}/{repo}/commit/{oid}"}
    if is_pull_request:
        answer["pullRequestUrl"] = f"{request.hub.endpoint}/{repo}/discussions/{number}"
    return answer


@route("GET", f"/{REPO}/resolve/(?P<revision>[^/]+|refs/[^/]+/[^/]+)/(?P<path>.+)")
def resolve(request, body, repo, revision, path):
    commit = request.commit(request.repo(repo), revision)
    if path not in commit.files:
        raise Refused(404, "Entry not found", "EntryNotFound", commit.oid)
    return 200, {"X-Repo-Commit": commit.oid, "ETag": f'"{commit.files[path].oid}"'}, commit.files[path].data
