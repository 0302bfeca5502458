"""Keys, tokens, passwords and places on somebody's computer are found in what is shared; names are not taken for them."""

import random
import re
import string

import pytest

from mhla_hf.share.leaks import check_leaks

HARMLESS = (
    "see https://example.org/home/anna/data and http://a.b/tmp/x",
    "/usr/bin/python, a/tmp/b, out/home/x, 1/2, and/or, ~5 %, /",
    "the token hf_transfer and the module sk-learn, task-based-learning-with-a-very-long-name-indeed-yes",
    "password: required; the api_key is yours, api_key = os.environ, secret_key=some_variable_of_yours, password=None",
    '{"password": 30921, "apikey": 118, "api_key": null, "access_token": 1234567890, "passwd": 1030921,"x": 1}',
    "a regular expression such as C:\\d+ and a time 12:30",
)


def test_harmless_text_passes(monkeypatch):
    for text in HARMLESS:
        check_leaks("README.md", text.encode())
    check_leaks("tokenizer.json", b'{"/home/x": 3, "~/a": 4}')
    monkeypatch.setenv("HF_TOKEN", "my-very-own-token")
    with pytest.raises(ValueError, match=r"notes\.txt:2 holds your own Hugging Face token") as caught:
        check_leaks("notes.txt", b"a\nmy-very-own-token")
    assert "my-very" not in str(caught.value)
    with pytest.raises(ValueError, match="names the local path '/elsewhere/me/too'"):
        check_leaks("notes.txt", b"in /elsewhere/me/too")


PLACES = (
    "/home/anna/x", "/Volumes/anna/x", "/lustre/a/b", "/u/anna/m.pt", "C:\\Users\\anna\\x", "E:/models/x/y", "/dev/shm/x/y",
    "\\\\nas\\models\\x", "~/secret.txt", "~anna/secret.txt", "file:///srv/anna",
)  # fmt: skip


def test_places_on_a_computer_are_found():
    for place in PLACES:
        with pytest.raises(ValueError, match=rf"NOTICE:2 names the local path {re.escape(repr(place))}"):
            check_leaks("NOTICE", f"a\nx={place}".encode())


TOKEN = "hf_" + "aB3" * 12
IN_FILES = {
    "that a second one hides": (
        "a.json",
        f'{{"hint": {{"a": ["{TOKEN}"], "a": 1}}}}',
        r"json:hint\.a holds what looks",
    ),
    "in a vocabulary": ("tokenizer.json", f'{{"hint": "{TOKEN}"}}', r"tokenizer\.json holds what looks"),
    "among merges": ("merges.txt", f"a b\n{TOKEN} c\n", r"merges\.txt holds what looks like"),
    "as a name": ("a.json", '{"hint": {"/home/anna/x": 1}}', "json:hint names the local path '/home/anna"),
    "by its name": ("a.json", '{"hint": {"password": "horse"}}', r"json:hint\.password holds .*Keyword"),
}


@pytest.mark.parametrize("case", IN_FILES)
def test_where_a_secret_may_stand(case):
    path, text, said = IN_FILES[case]
    with pytest.raises(ValueError, match=said) as caught:
        check_leaks(path, text.encode())
    assert TOKEN not in str(caught.value)


ALPHABETS = {"x": "0123456789abcdef", "9": "123456789", "s": string.ascii_letters}
ALPHABETS |= {"a": string.ascii_letters + string.digits}
ALPHABETS |= {"+": ALPHABETS["a"] + "+/", "-": ALPHABETS["a"] + "-_", "A": string.ascii_uppercase + "234567"}
# {a24}: 24 random letters and digits, and so on
SECRETS = (
    # services
    "sk_live_{a24}", "rk_live_{a99}", "sk_test_{a24}", "whsec_{a32}", "xoxb-{912}-{913}-{a24}", "xapp-1-A{a10}-{913}-{x64}",
    "https://hooks.slack.com/services/T{a8}/B{a8}/{a24}", "AIza{a35}", "ya29.{a60}", "GOCSPX-{a28}", "AccountKey={+86}==",
    "AZURE_CLIENT_SECRET={a3}8Q~{a34}", "https://me.blob.core.windows.net/c?sv=2022&sig={a43}%3D", "dapi{x32}", "AKIA{A16}",
    "aws_secret_access_key = {+40}", "aws_session_token={+300}", "hf_{s34}", "api_org_{s34}", "ghp_{a36}",
    "github_pat_{a22}_{a59}", "glpat-{a20}", "gldt-{a20}", "sk-{a48}", "sk-proj-{-74}T3BlbkFJ{-74}", "sk-ant-api03-{-93}AA",
    "gsk_{a52}", "r8_{a37}", "pplx-{a48}", "WANDB_API_KEY={x40}", "wandb login {x40}", "NEPTUNE_API_TOKEN=eyJ{a100}",
    "pypi-AgEIcHlwaS5vcmc{a120}", "npm_{a36}", "//registry.npmjs.org/:_authToken={x36}", "rubygems_{x48}", "dckr_pat_{a27}",
    "dop_v1_{x64}", "hvs.{a90}", "{a14}.atlasv1.{a64}", "shpat_{x32}", "SG.{a22}.{a43}", "key-{x32}", "{x32}-us12",
    "SK{x32}", "M{a23}.{a6}.{a27}", "https://discord.com/api/webhooks/{918}/{a68}", "the bot is {910}:AA{a33}",
    "glsa_{a32}_{x8}", "lin_api_{a40}", "secret_{a43}", "ATATT3xFfGF0{-180}={x8}", "sq0csp-{a43}", "PMAK-{x24}-{x34}",
    "AKC{a60}", "dp.pt.{a43}", "figd_{a40}", "pscale_tkn_{a43}", "HRKU-{x8}-{x4}-{x4}-{x4}-{x12}",
    "NRAK-{A27}", "{a3}8Q~{a34}",
    # by what stands before them
    "Authorization: Bearer {a40}", "Authorization: Bearer {x32}", "Authorization: Basic {+30}==", "X-Api-Key: {x32}",
    "token={x32}", "access_token: {a32}", "Cookie: session={a40}", "API_KEY=abcdef0123456789abcdef", "client_secret={a24}",
    '{"username": "anna", "key": "{x32}"}', "my_secret_key: '0123456789abcdef'", "COMET_API_KEY: {a25}",
    "password: hunter2", 'password = "correct-horse"', "db_password=pa55word", "PGPASSWORD=s3cr3tpw psql",
    "machine github.com login anna password hunter", "curl -u anna:hunter2xy", "sshpass -p hunter2x",
    "mysql --password=h2nter",
    "https://anna:geheim@example.org/x", "mongodb+srv://anna:geh3im@c.mongodb.net", "redis://:p4ssw0rd@host:6379",
    # keys
    "-----BEGIN PRIVATE KEY-----", "-----BEGIN RSA PRIVATE KEY-----", "-----BEGIN ENCRYPTED PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----", "PuTTY-User-Key-File-3: ssh-rsa", "AGE-SECRET-KEY-1{A58}",
)  # fmt: skip


@pytest.mark.parametrize("form", SECRETS)
def test_secrets_are_found_and_not_repeated(form):
    rng = random.Random(0)
    secret = re.sub(r"{(\D|9)(\d+)}", lambda found: "".join(rng.choices(ALPHABETS[found[1]], k=int(found[2]))), form)
    with pytest.raises(ValueError, match=r"README\.md:3 holds what looks like") as caught:
        check_leaks("README.md", f"one\ntwo\nsee {secret}, please".encode())
    assert secret not in str(caught.value)
