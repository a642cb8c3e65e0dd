package record

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"unicode/utf8"
)

func addGolden(f *testing.F) {
	files, err := filepath.Glob(filepath.Join(wireDir(f), "*.json"))
	if err != nil || len(files) == 0 {
		f.Fatal("no golden files", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
}

// What is accepted is JSON in UTF-8, a valid record, and the same record again after it is written.
func FuzzParseCloudEvent(f *testing.F) {
	addGolden(f)
	f.Add([]byte(`{"\u0069d":"1","id":null,"data":"\ud800"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := ParseCloudEvent(in)
		if err != nil {
			if !reflect.DeepEqual(r, Record{}) {
				t.Fatalf("a record beside %v", err)
			}
			if !utf8.ValidString(err.Error()) {
				t.Fatalf("the error is not UTF-8: %q", err)
			}
			return
		}
		if !utf8.Valid(in) || !json.Valid(in) {
			t.Fatal("accepted, yet not JSON")
		}
		if err := r.Check(); err != nil {
			t.Fatalf("accepted, yet %v", err)
		}
		var envelope struct {
			Data json.RawMessage `json:"data"`
		}
		// encoding/json takes names in any case, the last one wins; only compare where that cannot differ.
		if bytes.Count(bytes.ToLower(in), []byte("data\"")) == 1 {
			if err := json.Unmarshal(in, &envelope); err == nil && !bytes.Equal(envelope.Data, r.Data) {
				t.Fatalf("data is %q, encoding/json has %q", r.Data, envelope.Data)
			}
		}
		out := r.AppendCloudEvent(nil)
		again, err := ParseCloudEvent(out)
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%v\n got %+v\nwant %+v", err, again, r)
		}
	})
}

// The scanner accepts what encoding/json accepts.
func FuzzSkipValue(f *testing.F) {
	addGolden(f)
	for _, s := range []string{`-0.1e+2`, `01`, `"\u12G4"`, `[1,]`, `{"a":1,}`, `[[],{}]`, "\t1 ", `tru`, `"` + "\x1f" + `"`, `1.`, `-`, `{"a"}`, `{,}`, `[`, ``, `"\u12`, `"\`, `"a`, `1e`, `1e+`, `{"a"`, `{"a":1`, `{"a":1,`, `{"a" 1}`, `[1 2]`, `"\"\\\/\b\f\n\r\t\uaBcD"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		end, err := skipValue(in, 0)
		valid := err == nil && skipSpace(in, end) == len(in)
		if valid != json.Valid(in) {
			t.Fatalf("%q: accepted %v, encoding/json %v: %v", in, valid, !valid, err)
		}
	})
}

// What a control decoder accepts it can write, and reads back the same.
func FuzzParseControl(f *testing.F) {
	addGolden(f)
	f.Add((&BranchOpened{Parent: ulid1, ForkLSN: 1, Reason: "rewind"}).AppendData(nil))
	f.Add((&NodeRestored{Epoch: 2, BackupEpoch: 1}).AppendData(nil))
	f.Add((&Dead{Type: "t", Attempts: 3, Reason: "poison"}).AppendData(nil))
	f.Fuzz(func(t *testing.T, in []byte) {
		again(t, in, ParseBirth, func(m *Birth) []byte { return m.Append(nil) })
		again(t, in, ParseSync, func(m *Sync) []byte { return m.Append(nil) })
		again(t, in, ParseHeads, func(m *Heads) []byte { return m.Append(nil) })
		again(t, in, ParseHole, func(m *Hole) []byte { return m.Append(nil) })
		again(t, in, ParseReceipt, func(m *Receipt) []byte { return m.Append(nil) })
		again(t, in, ParseBranchOpened, func(m *BranchOpened) []byte { return m.AppendData(nil) })
		again(t, in, ParseNodeRestored, func(m *NodeRestored) []byte { return m.AppendData(nil) })
		again(t, in, ParseDead, func(m *Dead) []byte { return m.AppendData(nil) })
		IsHole(in)
	})
}

func again[T any](t *testing.T, in []byte, parse func([]byte) (T, error), write func(*T) []byte) {
	m, err := parse(in)
	if err != nil {
		return
	}
	first := write(&m)
	m2, err := parse(first)
	if err != nil {
		t.Fatalf("%T: %v: %s", m, err, first)
	}
	if second := write(&m2); !bytes.Equal(first, second) {
		t.Fatalf("%T\n got %s\nwant %s", m, second, first)
	}
}

func FuzzParseTopic(f *testing.F) {
	var s Topics
	for _, topic := range []string{s.Events("acme", "n", "a"), s.Resend("acme", "f", "n", "a"), s.NodeState("n"), s.Sync("acme", 3), s.NodeInbox("a", "n")} {
		f.Add(topic)
	}
	f.Fuzz(func(t *testing.T, topic string) {
		p, err := s.Parse(topic)
		if err != nil {
			return
		}
		var back string
		switch p.Kind {
		case EventsTopic:
			back = s.Events(p.Tenant, p.Node, p.Run)
		case NodeInboxTopic:
			back = s.NodeInbox(p.Tenant, p.Node)
		case AgentInboxTopic:
			back = s.AgentInbox(p.Tenant, p.Agent)
		case NodeStateTopic:
			back = s.NodeState(p.Node)
		case ReceiptsTopic:
			back = s.Receipts(p.Node)
		case SyncTopic:
			back = s.Sync(p.Tenant, p.Part)
		case HeadsTopic:
			back = s.Heads(p.Tenant, p.Part)
		case ResendTopic:
			back = s.Resend(p.Tenant, p.Fold, p.Node, p.Run)
		}
		if back != topic {
			t.Fatalf("%s came back as %s", topic, back)
		}
	})
}
