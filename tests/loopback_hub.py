"""A Hub on the loopback interface: what a push and a load ask of huggingface.co for models, in memory, with faults.

It is strict where a mistake of ours would hide: large files are hashed when they arrive and a commit may only name those
that did, a commit is checked whole before the branch moves, `parentCommit` must be the head, a token may write only to its
own user. Faults, `hub.fault("503", path="commit")`, are used up when they have struck: "503" refuses the request, "cut"
closes the connection before the request is carried out, "cut after" after it.
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


Entry = collections.namedtuple("Entry", "data oid")  # a file; oid: the digest of a large one, git's name of a text
Commit = collections.namedtuple("Commit", "oid parent files")


@dataclasses.dataclass
class Repo:
    """refs: "refs/heads/main", "refs/tags/v1", "refs/pr/1" -> commit id. lfs: sha256 -> bytes, arrived whole."""

    name: str
    private: bool
    commits: dict = dataclasses.field(default_factory=dict)
    refs: dict = dataclasses.field(default_factory=dict)
    lfs: dict = dataclasses.field(default_factory=dict)

    def add(self, ref, parent, files):
        oid = hashlib.sha1(f"{self.name} {ref} {parent} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, files)
        self.refs[ref] = oid
        return oid

    def find(self, revision):
        """The commit of a branch, tag, full ref or commit id; None when there is none."""
        refs = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return self.commits.get(next((self.refs[ref] for ref in refs if ref in self.refs), revision))

    def files(self, revision="main"):
        """path -> bytes at a revision."""
        return {path: file.data for path, file in self.find(revision).files.items()}


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status, message, code="", commit=""):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, "X-Error-Code": code, "X-Repo-Commit": commit}


class LoopbackHub:
    """`with LoopbackHub() as hub:` serves at `hub.endpoint` until the block ends.

    log: (method, path, bytes of the body) of every request that arrived. Files above 100 kB, and those that are no text, are
    large files.
    """

    def __init__(self):
        self.repos, self.faults, self.log = {}, [], []
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
        """Variables that make a process use this Hub, with its own Hugging Face home."""
        disabled = dict.fromkeys(("XET", "PROGRESS_BARS", "TELEMETRY"), "1")
        chosen = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        return chosen | {f"HF_HUB_DISABLE_{name}": value for name, value in disabled.items()}

    def fault(self, kind, path="", skip=0, times=1):
        """The next `times` requests whose path (a regular expression) fits fail, after `skip` that do not."""
        self.faults += [(None, path)] * skip + [(kind, path)] * times

    def strike(self, path):
        """The kind of fault that this request meets, or None."""
        with self.lock:
            fault = next((fault for fault in self.faults if re.search(fault[1], path)), (None, None))
            if fault in self.faults:
                self.faults.remove(fault)
        return fault[0]

    def put(self, name, files):
        """A repository with these files (path -> bytes) in one commit, as if somebody had pushed it."""
        repo = self.repos.setdefault(name, Repo(name, False))
        entries = {path: entry(data, is_large(path, data[:512], len(data))) for path, data in files.items()}
        repo.lfs.update({kept.oid: kept.data for kept in entries.values()})
        return repo.add("refs/heads/main", repo.refs.get("refs/heads/main"), entries)

    def sent(self, method, path):
        """How many requests fit."""
        return sum(made == method and re.search(path, where) is not None for made, where, _ in self.log)


def entry(data, large=False):
    text = f"blob {len(data)}\0".encode() + data
    return Entry(data, hashlib.sha256(data).hexdigest() if large else hashlib.sha1(text).hexdigest())


def is_large(path, sample, size):
    return size > 100_000 or path.endswith(".safetensors") or b"\0" in sample


def route(method, pattern):
    return lambda function: ROUTES.append((method, re.compile(pattern), function)) or function


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet: two would wait for each other, 40 ms a request
    disable_nagle_algorithm = True
    hub = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        where = unquote(urlsplit(self.path).path)
        fault = self.hub.strike(where)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.log.append((self.command, where, len(body)))
        self.close_connection = fault in ("cut", "cut after")
        if fault == "cut":
            return
        try:
            if fault == "503":
                raise Refused(503, "Service Unavailable")
            status, headers, answer = self.answer("GET" if self.command == "HEAD" else self.command, where, body)
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

    def answer(self, method, where, body):
        """(status, headers, body) from the function of the first route that fits."""
        for wanted, pattern, function in ROUTES:
            if wanted == method and (found := pattern.fullmatch(where)):
                with self.hub.lock:
                    given = function(self, body, **found.groupdict())
                return given if isinstance(given, tuple) else (200, {}, json.dumps(given).encode())
        raise Refused(404, f"no such endpoint: {method} {where}")

    @property
    def user(self):
        """Who asks; None without a token. A token that is not known is refused, as by the Hub."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            raise Refused(401, "Invalid credentials in Authorization header")
        return USER if token else None

    @property
    def query(self):
        return {key: values[-1] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def may_write(self, owner):
        if self.user != owner:
            raise Refused(403 if self.user else 401, f"You don't have the rights to write below {owner}")

    def repo(self, name, write=False):
        """The repository, where this user may see it (and write to it)."""
        user, owner, repo = self.user, name.split("/")[0], self.hub.repos.get(name)
        if repo is None or (repo.private and user != owner):
            raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        if write:
            self.may_write(owner)
        return repo

    def commit(self, repo, revision):
        if (found := repo.find(revision)) is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found


@route("GET", "/api/whoami-v2")
def whoami(ask, body):
    return {"type": "user", "name": ask.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}}


@route("POST", "/api/validate-yaml")
def validate_yaml(ask, body):
    return {"errors": [], "warnings": []}


@route("POST", "/api/repos/create")
def create_repo(ask, body):
    asked = json.loads(body)
    owner = asked.get("organization") or ask.user
    ask.may_write(owner or USER)
    name = f"{owner}/{asked['name']}"
    url = {"url": f"{ask.hub.endpoint}/{name}", "name": name}
    if name in ask.hub.repos:
        return 409, {}, json.dumps({**url, "error": "You already created this model repo"}).encode()
    repo = ask.hub.repos[name] = Repo(name, asked.get("visibility") == "private")
    repo.add("refs/heads/main", None, {".gitattributes": entry(b"*.safetensors filter=lfs\n")})
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
    shown = {"_id": repo, "id": repo, "modelId": repo, "sha": commit.oid, "private": found.private, "tags": []}
    return shown | {"siblings": [{"rfilename": path} for path in commit.files]}


@route("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+|refs/[^/]+/[^/]+)(?:/(?P<folder>.+))?")
def tree(ask, body, repo, revision, folder):
    commit = ask.commit(ask.repo(repo), revision)
    below = [(path, file) for path, file in commit.files.items() if path.startswith(f"{folder}/" if folder else "")]
    if folder and not below:
        raise Refused(404, f"{folder} does not exist", "EntryNotFound", commit.oid)
    return [{"type": "file", "oid": file.oid, "size": len(file.data), "path": path} for path, file in below]


@route("GET", f"/api/models/{REPO}/refs")
def refs(ask, body, repo):
    shown = {"heads": [], "tags": [], "pr": []}
    for ref, oid in ask.repo(repo).refs.items():
        kind, name = ref.removeprefix("refs/").split("/", 1)
        shown[kind].append({"name": name, "ref": ref, "targetCommit": oid})
    return {"branches": shown["heads"], "tags": shown["tags"], "converts": [], "pullRequests": shown["pr"]}


@route("POST", f"/api/models/{REPO}/(?P<kind>tag|branch)/(?P<name>.+)")
def create_ref(ask, body, repo, kind, name):
    """Of a tag the path names the commit and the body the tag; of a branch the path names the branch."""
    found, asked = ask.repo(repo, write=True), json.loads(body or b"{}")
    start = name if kind == "tag" else asked.get("startingPoint", "main")
    ref = f"refs/tags/{asked['tag']}" if kind == "tag" else f"refs/heads/{name}"
    if ref in found.refs:
        raise Refused(409, "Reference already exists")
    found.refs[ref] = ask.commit(found, start).oid
    return {}


@route("POST", f"/api/models/{REPO}/preupload/(?P<revision>.+)")
def preupload(ask, body, repo, revision):
    commit = ask.commit(ask.repo(repo, write="create_pr" not in ask.query), revision)
    answer = []
    for file in json.loads(body)["files"]:
        path, known = file["path"], commit.files.get(file["path"])
        large = is_large(path, base64.b64decode(file["sample"]), file["size"])
        shown = {"path": path, "uploadMode": "lfs" if large else "regular", "oid": known and known.oid}
        answer.append(shown | {"shouldIgnore": False})
    return {"files": answer}


@route("POST", f"/{REPO}.git/info/lfs/objects/batch")
def lfs_batch(ask, body, repo):
    found, answer = ask.repo(repo), []
    for asked in json.loads(body)["objects"]:
        upload = {"href": f"{ask.hub.endpoint}/storage/{repo}/{asked['oid']}", "header": {}}
        answer.append(asked | ({} if asked["oid"] in found.lfs else {"actions": {"upload": upload}}))
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
    head = ask.commit(found, revision)
    header, *lines = (json.loads(line) for line in body.splitlines())
    files = dict(head.files)
    if header["value"].get("parentCommit") not in (None, head.oid):
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "file":
            files[value["path"]] = entry(base64.b64decode(value["content"], validate=True))
        elif key == "lfsFile" and value["oid"] in found.lfs:
            files[value["path"]] = entry(found.lfs[value["oid"]], True)
        elif key == "deletedFile" and value["path"] in files:
            del files[value["path"]]
        else:
            raise Refused(400, f"{key}: {value} cannot be carried out")
    number = sum(ref.startswith("refs/pr/") for ref in found.refs) + 1
    oid = found.add(f"refs/pr/{number}" if request else f"refs/heads/{revision}", head.oid, files)
    answer = {"success": True, "commitOid": oid, "commitUrl": f"{ask.hub.endpoint}/{repo}/commit/{oid}"}
    return answer | ({"pullRequestUrl": f"{ask.hub.endpoint}/{repo}/discussions/{number}"} if request else {})


@route("GET", f"/{REPO}/resolve/(?P<revision>[^/]+|refs/[^/]+/[^/]+)/(?P<path>.+)")
def resolve(ask, body, repo, revision, path):
    commit = ask.commit(ask.repo(repo), revision)
    if path not in commit.files:
        raise Refused(404, "Entry not found", "EntryNotFound", commit.oid)
    return 200, {"X-Repo-Commit": commit.oid, "ETag": f'"{commit.files[path].oid}"'}, commit.files[path].data
