"""Thirty git configurations that users have. BITES: those under which plain `git diff` prints something else."""
EXTERNAL = "/bin/echo"

CONFIGS = {
    "none": "",
    "noprefix": "[diff]\nnoprefix = true\n",
    "mnemonic prefix": "[diff]\nmnemonicPrefix = true\n",
    "own prefixes": "[diff]\nsrcPrefix = old/\ndstPrefix = new/\n",
    "patience": "[diff]\nalgorithm = patience\n",
    "histogram": "[diff]\nalgorithm = histogram\n",
    "minimal, no indent heuristic": "[diff]\nalgorithm = minimal\nindentHeuristic = false\n",
    "wide context": "[diff]\ncontext = 10\n",
    "no context": "[diff]\ncontext = 0\n",
    "inter-hunk context": "[diff]\ninterHunkContext = 30\n",
    "order file": "[diff]\norderFile = {order}\n",
    "copies": "[diff]\nrenames = copies\n",
    "colour": "[color]\nui = always\ndiff = always\n[diff]\ncolorMoved = zebra\nwsErrorHighlight = all\n",
    "external diff": f"[diff]\nexternal = {EXTERNAL}\n",
    "attributes": "[core]\nattributesFile = {attributes}\n[diff \"shout\"]\n"
                  "textconv = tr a-z A-Z <\nxfuncname = ^line.*$\n",
    "binary by attribute": "[core]\nattributesFile = {binary}\n",
    "raw names": "[core]\nquotePath = false\n",
    "short ids": "[core]\nabbrev = 5\n",
    "full ids": "[core]\nabbrev = 40\n",
    "autocrlf": "[core]\nautocrlf = true\nsafecrlf = true\neol = crlf\n",
    "whitespace fix": "[apply]\nwhitespace = fix\nignoreWhitespace = change\n"
                      "[core]\nwhitespace = tab-in-indent,cr-at-eol\n",
    "whitespace error": "[apply]\nwhitespace = error-all\n",
    "suppress blank empty": "[diff]\nsuppressBlankEmpty = true\n",
    "relative": "[diff]\nrelative = true\n",
    "stat, word diff, submodules": "[diff]\nstatGraphWidth = 5\nwordRegex = .\n"
                                   "submodule = log\nignoreSubmodules = all\n",
    "format": "[format]\nsignature = me\nsubjectPrefix = RFC\nnumbered = true\nattach = x\n"
              "signOff = true\nnotes = true\n"
              "headers = \"X-Mine: 1\\n\"\npretty = fuller\nuseAutoBase = true\nfrom = true\n",
    "signing and hooks": "[commit]\ngpgSign = true\n[tag]\ngpgSign = true\n[gpg]\nprogram = /bin/false\n"
                         "[core]\nhooksPath = {hooks}\n[init]\ntemplateDir = {hooks}\n",
    "notes and log": "[notes]\nrewriteRef = refs/notes/*\ndisplayRef = *\n"
                     "[log]\nshowSignature = true\ndate = relative\n",
    "sha256 and bare repositories": "[init]\ndefaultObjectFormat = sha256\n[safe]\nbareRepository = explicit\n"
                                    "[extensions]\nobjectFormat = sha256\n",
    "merge": "[merge]\nconflictStyle = zdiff3\nrenames = false\ntool = none\n"
             "[rerere]\nenabled = true\n[diff]\nrenames = false\n",
    "pager and editor": "[core]\npager = false\neditor = false\n[pager]\ndiff = false\n[alias]\ndiff-tree = !false\n",
}
BITES = ("noprefix", "mnemonic prefix", "wide context", "no context", "inter-hunk context", "order file", "colour",
         "external diff", "attributes", "binary by attribute", "short ids", "full ids", "copies")
ENVIRONMENT = {"GIT_EXTERNAL_DIFF": EXTERNAL, "GIT_DIFF_OPTS": "--unified=9", "GIT_DEFAULT_HASH": "sha256",
               "GIT_ATTR_SOURCE": "HEAD", "GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/nowhere", "LC_ALL": "C.UTF-8",
               "LANGUAGE": "de", "GIT_INDEX_FILE": "/nowhere/index", "GIT_CONFIG_PARAMETERS": "'diff.noprefix=true'"}


def write(name: str, folder):
    """The configuration as a file in `folder`, with the files it names."""
    places = {"order": "*.py\n*.txt\n", "attributes": "* diff=shout\n", "binary": "* binary\n"}
    for place, text in places.items():
        (folder / place).write_text(text)
    (folder / "hooks").mkdir()
    path = folder / "gitconfig"
    text = CONFIGS[name]
    for place in (*places, "hooks"):
        text = text.replace("{" + place + "}", str(folder / place))
    path.write_text(text)
    return path


def install(name: str, folder, monkeypatch) -> None:
    """Make it the configuration of the user who runs the test, by every way git has."""
    path = write(name, folder)
    home = folder / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / ".gitconfig").write_text(path.read_text())
    (home / ".config/git/config").write_text(path.read_text())
    (home / ".config/git/attributes").write_text("* diff=shout text eol=crlf\n")
    for variable, value in {"HOME": home, "XDG_CONFIG_HOME": home / ".config", "GIT_CONFIG_GLOBAL": path,
                            "GIT_CONFIG_SYSTEM": path, **ENVIRONMENT}.items():
        monkeypatch.setenv(variable, str(value))
