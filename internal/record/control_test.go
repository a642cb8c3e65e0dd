package record

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestControlDecodersIgnoreWhatMayFollow(t *testing.T) {
	for name, c := range controls() {
		more := strings.Replace(string(c.bytes), "{", `{"later":{"x":[1]},`, 1)
		got, err := c.parse([]byte(more))
		if err != nil || !reflect.DeepEqual(got, c.message) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// Lists are [] and not null, for readers in languages that tell them apart.
func TestControlListsAreNeverNull(t *testing.T) {
	for want, got := range map[string][]byte{
		`{"node":"n","instance":"i","epoch":1,"ship_seq":0,"online":false,"tenants":[],"public":[]}`: (&Birth{Node: "n", Instance: "i", Epoch: 1}).Append(nil),
		`{"fold":"f","node":null,"after":null,"ranges":[]}`:                                          (&Sync{Fold: "f"}).Append(nil),
		`{"node":"n","epoch":1,"seq":0,"chunk":1,"last":true,"runs":[]}`:                             (&Heads{Node: "n", Epoch: 1, Chunk: 1, Last: true}).Append(nil),
		`{"from":"n","items":[]}`: (&Receipt{From: "n"}).Append(nil),
	} {
		if string(got) != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}

func TestControlDecodersRefuse(t *testing.T) {
	all := controls()
	for _, c := range []struct{ file, old, new, want string }{
		{"birth.json", `{`, `[`, "parse birth: "},
		{"birth.json", `"epoch":1767225600`, `"epoch":"1"`, "parse birth: "},
		{"birth.json", `"edge-1"`, `"edge/1"`, "node"},
		{"birth.json", `"node":"edge-1",`, ``, "node is empty"},
		{"birth.json", `"5f1c"`, `""`, "instance is empty"},
		{"birth.json", `"5f1c"`, `"\n"`, "instance"},
		{"birth.json", `1767225600`, `-1`, "epoch -1 is below 0"},
		{"birth.json", `812`, `-1`, "ship_seq -1 is below 0"},
		{"birth.json", `"acme"`, `"ac+me"`, "tenants"},
		{"birth.json", `"billing"`, `""`, "public"},
		{"sync-after.json", `"wall"`, `"wall.local"`, "fold"},
		{"sync-after.json", `"edge-1"`, `"#"`, "node"},
		{"sync-after.json", `1767225600`, `-1`, "after.epoch"},
		{"sync-after.json", `800`, `-1`, "after.seq"},
		{"sync-ranges.json", `"node":"edge-1","run"`, `"node":"","run"`, "ranges.node"},
		{"sync-ranges.json", `"order-9"`, `"~other"`, "ranges.run"},
		{"sync-ranges.json", ulid1, "X", "ranges.branch"},
		{"sync-ranges.json", `"from":2`, `"from":0`, "ranges 0 to 5 is no range"},
		{"sync-ranges.json", `"from":2`, `"from":6`, "ranges 6 to 5 is no range"},
		{"heads-1.json", `"node":"edge-1"`, `"node":null`, "node is empty"},
		{"heads-1.json", `"epoch":1767225600`, `"epoch":-1`, "epoch"},
		{"heads-1.json", `"seq":812`, `"seq":-1`, "seq"},
		{"heads-1.json", `"chunk":1`, `"chunk":0`, "chunk 0 is below 1"},
		{"heads-1.json", `"order-9"`, `""`, "runs.run"},
		{"heads-1.json", `"branch":"` + ulid1, `"branch":"`, "runs.branch"},
		{"heads-1.json", `"gen":1`, `"gen":0`, "runs.gen"},
		{"heads-1.json", `"parent":"` + ulid1, `"parent":"x`, "runs.parent"},
		{"heads-1.json", `"fork_lsn":2`, `"fork_lsn":0`, "runs.fork_lsn"},
		{"heads-1.json", `"fork_lsn":0`, `"fork_lsn":1`, "runs.fork_lsn is 1 without a parent"},
		{"heads-1.json", `"event_lsn":5`, `"event_lsn":-5`, "runs.event_lsn"},
		{"hole.json", `"hole"`, `"whole"`, "hole is missing"},
		{"hole.json", `"from":3`, `"from":0`, "hole 0 to 9 is no range"},
		{"hole.json", `"from":3`, `"from":2`, "hole.from 2 is not after the fork"},
		{"hole.json", ulid2, "", "hole.branch"},
		{"receipt.json", `"hq"`, `""`, "from is empty"},
		{"receipt.json", `"default"`, `""`, "items.tenant"},
		{"receipt.json", `"order-9"`, `""`, "items.run"},
		{"receipt.json", ulid1, "", "items.branch"},
		{"receipt.json", `"stored"`, `"kept"`, `items.outcome "kept" is not known`},
		{"receipt.json", `[4,4]`, `[4]`, "items.ranges has a range of 1 numbers"},
		{"receipt.json", `[4,4]`, `[4,4,4]`, "items.ranges has a range of 3 numbers"},
		{"receipt.json", `[4,4]`, `[4,3]`, "items.ranges 4 to 3 is no range"},
	} {
		in := string(all[c.file].bytes)
		if !strings.Contains(in, c.old) {
			t.Fatalf("%s is not in %s", c.old, in)
		}
		_, err := all[c.file].parse([]byte(strings.Replace(in, c.old, c.new, 1)))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s with %s: error %v, want %s", c.file, c.new, err, c.want)
		}
	}
}

func TestHolesAreToldFromEvents(t *testing.T) {
	for name := range events() {
		if b, _ := os.ReadFile(filepath.Join(wireDir(t), name)); IsHole(b) {
			t.Errorf("%s is taken for a hole", name)
		}
	}
	for in, want := range map[string]bool{
		string(controls()["hole.json"].bytes): true, " {\n\"hole\" : {}}": true, `{"holes":1}`: false, `{"x":"hole"}`: false, "{": false, "": false, `["hole"]`: false,
	} {
		if IsHole([]byte(in)) != want {
			t.Errorf("IsHole(%s) is not %v", in, want)
		}
	}
}

func TestRuntimeEventDataRoundTrips(t *testing.T) {
	o := BranchOpened{Parent: ulid1, ForkStep: 0, ForkLSN: 1, Reason: `operator's <"wish"> ` + "\u2028"}
	if got, err := ParseBranchOpened(o.AppendData(nil)); err != nil || got != o {
		t.Errorf("%+v, %v", got, err)
	}
	n := NodeRestored{Epoch: 5, BackupEpoch: 4}
	if got, err := ParseNodeRestored(n.AppendData(nil)); err != nil || got != n {
		t.Errorf("%+v, %v", got, err)
	}
	d := Dead{Type: "t", Attempts: 3, Reason: "poison", FirstError: "a", LastError: "b"}
	if got, err := ParseDead(d.AppendData(nil)); err != nil || got != d {
		t.Errorf("%+v, %v", got, err)
	}
	for in, want := range map[string]string{
		`{"parent":"x","fork_step":1,"fork_lsn":2}`:               "parent",
		`{"parent":"` + ulid1 + `","fork_step":-1,"fork_lsn":2}`:  "fork_step",
		`{"parent":"` + ulid1 + `","fork_step":1,"fork_lsn":0}`:   "fork_lsn",
		`{"parent":"` + ulid1 + `","fork_step":1.5,"fork_lsn":2}`: "parse branch.opened",
		`[]`: "parse branch.opened",
	} {
		if _, err := ParseBranchOpened([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %s", in, err, want)
		}
	}
	for _, in := range []string{`{}`, `{"epoch":4,"backup_epoch":4}`, `{"epoch":4,"backup_epoch":-1}`, `7`} {
		if _, err := ParseNodeRestored([]byte(in)); err == nil {
			t.Errorf("%s passes", in)
		}
	}
	if _, err := ParseDead([]byte("[")); err == nil {
		t.Error("[ passes")
	}
	if !IsReserved("postrider.x") || IsReserved("postrider") || IsReserved("a.postrider.") {
		t.Error("IsReserved")
	}
}

// What the hand-written encoders write is what encoding/json would, but for its HTML escapes.
func TestControlMessagesAreTheirStructs(t *testing.T) {
	for name, c := range controls() {
		if name == "hole.json" || strings.HasPrefix(name, "sync") { // wrapped; null for ""
			continue
		}
		if want, err := json.Marshal(c.message); err != nil || string(want) != string(c.bytes) {
			t.Errorf("%s\n got %s\nwant %s, %v", name, c.bytes, want, err)
		}
	}
}
