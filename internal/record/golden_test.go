package record

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	ce "github.com/cloudevents/sdk-go/v2/event"
)

var update = flag.Bool("update", false, "write the golden files of testdata/wire")

const (
	ulid1 = "01KE0Z3Q6V4W8N2M5T7R9X1Y3B"
	ulid2 = "01KE0ZBQ6V4W8N2M5T7R9X1Y3C"
	when  = 1767323045000006 // 2026-01-02T03:04:05.000006Z
)

// sample is an event with nothing optional.
func sample() Record {
	return Record{
		Node: "edge-1", Key: BranchKey{Tenant: "default", Run: "order-9", Branch: ulid1}, LSN: 3, PrevLSN: 2, Gen: 1,
		Epoch: 1767225600, Step: 2, Kind: Event, Type: "counted", Data: []byte(`{"n":3}`),
		Occurred: when, Recorded: when + 120_000,
	}
}

func full() Record {
	r := sample()
	r.Subject = `line-1 <"7">`
	r.Correlation = "order-9"
	r.Causation = "pr:edge-1/default/order-9/c-1"
	r.Trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	r.Data = []byte(`{"n": 9007199254740993, "p":0.10,  "s":"a<b>&\u2028` + "\u2028" + `"}`)
	return r
}

func command() Record {
	r := sample()
	r.Kind = Command
	r.Type = "charge"
	r.LSN, r.PrevLSN = 4, 3
	r.ToAgent, r.ToRun, r.InputID, r.Hops = "billing", "inv-7", "pr:edge-1/default/order-9/c-1", 1
	r.Data = []byte(`{"eur":12.50}`)
	r.Expires = when + 3_600_000_000
	return r
}

func runtimeEvent(typ string, data []byte) Record {
	r := sample()
	r.Key.Branch, r.Gen, r.Step = ulid2, 2, 1
	r.Type, r.Data = typ, data
	return r
}

// events are the golden files that are CloudEvents.
func events() map[string]Record {
	plain, rich, com := sample(), full(), command()
	noExpiry := command()
	noExpiry.Expires, noExpiry.Hops = 0, 0
	mark := plain.Mark(Dead{Attempts: 3, Reason: "poison", FirstError: "connection closed by the broker", LastError: "acknowledged the probe, not the record"})
	opened := runtimeEvent(TypeBranchOpened, (&BranchOpened{Parent: ulid1, ForkStep: 1, ForkLSN: 2, Reason: "rewind"}).AppendData(nil))
	restored := runtimeEvent(TypeNodeRestored, (&NodeRestored{Epoch: 1767225601, BackupEpoch: 1767225600}).AppendData(nil))
	restored.LSN, restored.PrevLSN, restored.Epoch = 4, 3, 1767225601
	return map[string]Record{
		"event.json": plain, "event-full.json": rich, "branch-opened.json": opened, "record-dead.json": mark,
		"node-restored.json": restored, "command-expiry.json": com, "command.json": noExpiry,
	}
}

// controls are the other golden files: the message, and how it is read back.
func controls() map[string]control {
	return map[string]control{
		"birth.json":      of(&Birth{Node: "edge-1", Instance: "5f1c", Epoch: 1767225600, ShipSeq: 812, Online: true, Tenants: []string{"acme", "default"}, Public: []string{"billing"}}, ParseBirth),
		"will.json":       of(&Birth{Node: "edge-1", Instance: "5f1c", Epoch: 1767225600, ShipSeq: 812, Tenants: []string{}, Public: []string{}}, ParseBirth),
		"sync-all.json":   of(&Sync{Fold: "wall", Ranges: []Range{}}, ParseSync),
		"sync-after.json": of(&Sync{Fold: "wall", Node: "edge-1", After: &Cursor{Epoch: 1767225600, Seq: 800}, Ranges: []Range{}}, ParseSync),
		"sync-ranges.json": of(&Sync{Fold: "wall", Node: "edge-1", Ranges: []Range{
			{Node: "edge-1", Run: "order-9", Branch: ulid1, From: 2, To: 5}, {Node: "edge-1", Run: NodeRun, Branch: ulid2, From: 7, To: 7},
		}}, ParseSync),
		"heads-1.json": of(&Heads{Node: "edge-1", Epoch: 1767225600, Seq: 812, Chunk: 1, Runs: []Head{
			{Run: "order-9", Branch: ulid1, Gen: 1, Epoch: 1767225600, EventLSN: 5},
			{Run: "order-9", Branch: ulid2, Gen: 2, Epoch: 1767225600, Parent: ulid1, ForkLSN: 2, Live: true, EventLSN: 4},
		}}, ParseHeads),
		"heads-2.json": of(&Heads{Node: "edge-1", Epoch: 1767225600, Seq: 812, Chunk: 2, Last: true, Runs: []Head{}}, ParseHeads),
		"hole.json":    of(&Hole{Branch: ulid2, Gen: 2, Epoch: 1767225600, Parent: ulid1, ForkLSN: 2, From: 3, To: 9}, ParseHole),
		"receipt.json": of(&Receipt{From: "hq", Items: []ReceiptItem{
			{Tenant: "default", Run: "order-9", Branch: ulid1, Ranges: [][2]int64{{4, 4}, {7, 9}}, Outcome: Stored},
			{Tenant: "default", Run: NodeRun, Branch: ulid2, Ranges: [][2]int64{{1, 1}}, Outcome: Conflict},
		}}, ParseReceipt),
	}
}

type control struct {
	message any // a pointer
	bytes   []byte
	parse   func([]byte) (any, error) // gives a pointer too
}

func of[T any, P interface {
	*T
	Append([]byte) []byte
}](m P, parse func([]byte) (T, error)) control {
	return control{(*T)(m), m.Append(nil), func(b []byte) (any, error) {
		v, err := parse(b)
		return &v, err
	}}
}

func wireDir(t testing.TB) string {
	dir, err := os.Getwd()
	for err == nil {
		if _, missing := os.Stat(filepath.Join(dir, "go.mod")); missing == nil {
			return filepath.Join(dir, "testdata", "wire")
		}
		if dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	t.Fatal("no go.mod above the working directory", err)
	return ""
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join(wireDir(t), name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s\n got %s\nwant %s", name, got, want)
	}
}

// The golden files have no newline at their end: they are the bytes on the wire.
func TestWireIsGolden(t *testing.T) {
	named := map[string]bool{}
	for name, r := range events() {
		named[name] = true
		b := r.AppendCloudEvent(nil)
		golden(t, name, b)
		got, err := ParseCloudEvent(b)
		if err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("%s read back: %v\n got %+v\nwant %+v", name, err, got, r)
		}
	}
	for name, c := range controls() {
		named[name] = true
		golden(t, name, c.bytes)
		got, err := c.parse(c.bytes)
		if err != nil || !reflect.DeepEqual(got, c.message) {
			t.Errorf("%s read back: %v\n got %+v\nwant %+v", name, err, got, c.message)
		}
	}
	files, err := os.ReadDir(wireDir(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !named[f.Name()] {
			t.Errorf("%s is no message's golden file", f.Name())
		}
	}
}

// The official SDK is the independent reader: what it makes of our bytes is what everybody else will.
func TestCloudEventsSDKReadsTheWire(t *testing.T) {
	for name, r := range events() {
		b, err := os.ReadFile(filepath.Join(wireDir(t), name))
		if err != nil {
			t.Fatal(err)
		}
		var e ce.Event
		if err := e.UnmarshalJSON(b); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := e.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		dec := func(n int64) string { return strconv.FormatInt(n, 10) }
		ext := map[string]any{
			"sequence": strings.Repeat("0", 20-len(dec(r.LSN))) + dec(r.LSN), "partitionkey": r.Key.Tenant + "/" + r.Key.Run,
			"prevlsn": dec(r.PrevLSN), "branchgen": dec(r.Gen), "nodeepoch": dec(r.Epoch), "step": dec(r.Step),
			"recordedtime": "2026-01-02T03:04:05.120006Z",
		}
		for k, v := range map[string]string{"correlationid": r.Correlation, "causationid": r.Causation, "traceparent": r.Trace} {
			if v != "" {
				ext[k] = v
			}
		}
		if r.Kind == Command {
			ext["toagent"], ext["torun"], ext["inputid"], ext["hops"] = r.ToAgent, r.ToRun, r.InputID, dec(r.Hops)
			if r.Expires != 0 {
				ext["expirytime"] = "2026-01-02T04:04:05.000006Z"
			}
		}
		if got := e.Extensions(); !reflect.DeepEqual(got, ext) {
			t.Errorf("%s extensions\n got %v\nwant %v", name, got, ext)
		}
		got := []string{e.SpecVersion(), e.ID(), e.Source(), e.Type(), e.Subject(), e.DataContentType(), dec(e.Time().UnixMicro()), string(e.Data())}
		want := []string{"1.0", dec(r.LSN), r.Source(), r.Type, r.Subject, "application/json", dec(r.Occurred), string(r.Data)}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s\n got %q\nwant %q", name, got, want)
		}
	}
}

func TestMarkStandsInItsRecordsPlace(t *testing.T) {
	r := full()
	r.Type = "x" + strings.Repeat("é", 1000)
	m := r.Mark(Dead{Attempts: 3, Reason: "poison", FirstError: strings.Repeat("x", 1<<20)})
	if !m.IsMark() || r.IsMark() {
		t.Error("IsMark does not tell a mark from its record")
	}
	if m.Key != r.Key || m.LSN != r.LSN || m.PrevLSN != r.PrevLSN || m.Source() != r.Source() {
		t.Errorf("%+v is elsewhere", m)
	}
	if b := m.AppendCloudEvent(nil); len(b) > 2048 {
		t.Errorf("a mark has %d bytes", len(b))
	}
	if err := m.Check(); err != nil {
		t.Error(err)
	}
	d, err := ParseDead(m.Data)
	if err != nil || d.Attempts != 3 || d.Reason != "poison" || d.Type != "x"+strings.Repeat("é", 127) || len(d.FirstError) != 256 {
		t.Errorf("%+v, %v", d, err)
	}
}
