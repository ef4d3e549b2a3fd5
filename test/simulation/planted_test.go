package simulation

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// planted is a bug for the checks to find: a text of the product's code, and what it is
// replaced by in a copy.
type planted struct {
	name      string
	file      string // in the repository
	text, bug string
}

var bugs = []planted{
	{"a removal loses its first block", "internal/cache/events/apply.go",
		"Kind: radix.Removed, Group: int32(group), Hashes: hashes})", "Kind: radix.Removed, Group: int32(group), Hashes: hashes[min(1, len(hashes)):]})"},
	{"a booking is released twice", "internal/decide/router/booking.go",
		"if b.ended.Load() {\n\t\treturn\n\t}\n\tb.ended.Store(true)", "b.ended.Store(true)"},
	{"a replay skips a batch that is missing", "internal/cache/events/replay.go",
		"if seq > s.next {\n\t\t\treturn errReplayHole\n\t\t}", "s.next = max(s.next, seq)"},
	{"an engine that has restarted is taken for the one before", "internal/cache/events/replay.go",
		"if xxh3.Hash(payload) != s.sum {", "if false {"},

	{"the decode worker of a failed pair stays booked", "internal/serve/proxy/pairs.go",
		"\tdefer pair.End()\n", ""},
	{"two requests have one bootstrap room", "internal/serve/proxy/pairs.go",
		"room := binary.LittleEndian.Uint64(b[:]) >> 1", "room := binary.LittleEndian.Uint64(b[:]) >> 62"},
	{"a prompt goes to a decode worker of another kind", "internal/decide/router/pair.go",
		"leg.Leg, leg.Kinds, leg.Override, leg.Cached = kv.LegDecode, kv.KindsOf(prefill.Kind), &override, &none", "leg.Leg, leg.Kinds, leg.Override, leg.Cached = kv.LegWhole, 0, &override, &none"},

	{"a snapshot is restored without a proof", "internal/cache/events/snapshot.go",
		"stream.next, stream.sum, stream.layout, stream.layoutText = rank.at.next, rank.at.sum, rank.layout, rank.at.layout\n",
		"stream.next, stream.sum, stream.layout, stream.layoutText = rank.at.next, rank.at.sum, rank.layout, rank.at.layout\n\tstream.restore()\n"},
	{"a snapshot's checksum is not checked", "internal/cache/events/snapshotfile.go",
		"if xxh3.Hash(body) != sum {", "if xxh3.Hash(body) != sum && sum == 0 {"},
	{"a snapshot claims a batch that it does not have", "internal/cache/events/snapshot.go",
		"s.history.reach(rank.at)", "rank.at.next++\n\ts.next++\n\ts.history.reach(rank.at)"},

	{"a session does not stay", "internal/decide/router/session.go",
		"d.candidates = d.candidates[:1]\n\t\treturn true", "return true"},
	{"an old binding of a session displaces a later one", "internal/decide/router/share.go",
		"version.compare(known.version) < 0", "version.compare(known.version) > 0"},
	{"a session that stays is not sent again", "internal/decide/router/share.go",
		"p.sessionGoes == SessionKept && now.Sub(s.sent) < r.settings.SessionTTL/sessionSentEvery", "p.sessionGoes == SessionKept"},

	{"routers do not ask for bookings again", "internal/peers/replica/books.go",
		"\treturn ask\n", "\treturn 0\n"},
	{"the retry budget denies nothing", "internal/decide/health/budget.go",
		"if denied := b.denied(s, at); denied != \"\" {", "if denied := b.denied(s, at); false {"},
}

// root is the repository.
const root = "../.."

// TestPlantedBugsFit holds that every bug has its place in the code as it is.
func TestPlantedBugsFit(t *testing.T) {
	for _, bug := range bugs {
		if n := strings.Count(bug.read(t), bug.text); n != 1 {
			t.Errorf("%s: its place is %d times in %s: adapt the bug to the code", bug.name, n, bug.file)
		}
	}
}

func (p planted) read(t *testing.T) string {
	code, err := os.ReadFile(filepath.Join(root, p.file))
	if err != nil {
		t.Fatal(err)
	}
	return string(code)
}

// TestPlantedBugs builds the simulation with each of the bugs in turn, and holds that one
// of 1,000 seeds finds it. Building takes minutes: it runs if KVROUTER_PLANTED is set.
func TestPlantedBugs(t *testing.T) {
	if os.Getenv("KVROUTER_PLANTED") == "" {
		t.Skip("make dst-bugs runs it")
	}
	found := regexp.MustCompile(`first seed that fails: (\d+): .*`)
	for _, bug := range bugs {
		t.Run(strings.ReplaceAll(bug.name, " ", "-"), func(t *testing.T) {
			output, err := bug.plant(t)
			if first := found.FindString(output); err == nil || first == "" {
				t.Errorf("no seed of 1,000 finds it: %v\n%s", err, output)
			} else {
				t.Log(first)
			}
		})
	}
}

// plant runs up to 1,000 seeds with the bug, up to the first that finds it.
func (p planted) plant(t *testing.T) (output string, err error) {
	folder := t.TempDir()
	original, err := filepath.Abs(filepath.Join(root, p.file))
	if err != nil {
		t.Fatal(err)
	}
	changed, overlay, binary := filepath.Join(folder, "changed.go"), filepath.Join(folder, "overlay.json"), filepath.Join(folder, "simulation.test")
	places, err := json.Marshal(map[string]any{"Replace": map[string]string{original: changed}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{changed: strings.Replace(p.read(t), p.text, p.bug, 1), overlay: string(places)} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if output, err := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", binary, "-overlay", overlay, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	text, err := exec.CommandContext(t.Context(), binary, "-test.run", "^TestSimulation$", "-test.timeout", "10m", "-seeds", "1000", "-first").CombinedOutput()
	return string(text), err
}
