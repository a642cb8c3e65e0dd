//go:build faults

package fold

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"postrider/internal/record"
)

// The example for other languages, testdata/consumer, must come to what this package comes to. A missing python3 fails
// these tests; they never skip.

// drive has the example fold lists of messages. A request and an answer are a line of JSON each.
const drive = `
import base64, contextlib, io, json, sys
sys.path.insert(0, "../testdata/consumer")
import fold
for line in sys.stdin:
    db, told = fold.connect(":memory:"), io.StringIO()
    request = json.loads(line)
    with contextlib.redirect_stderr(told):
        for m in request["messages"]:
            fold.fold(db, m["topic"], base64.b64decode(m["payload"]))
    print(json.dumps({
        "shown": [fold.show(db, run) for run in request["runs"]],
        "records": db.execute("SELECT count(*) FROM event").fetchone()[0],
        "malformed": db.execute("SELECT count(*) FROM odd").fetchone()[0],
        "told": told.getvalue(),
    }), flush=True)
`

type message struct {
	Topic   string `json:"topic"`
	Payload []byte `json:"payload"`
}

// outcome is what a consumer made of messages.
type outcome struct {
	Shown     []string `json:"shown"` // of each run
	Records   int64    `json:"records"`
	Malformed int64    `json:"malformed"`
	Told      string   `json:"told"` // on stderr
}

// conflicts counts the lines that told of one.
func (o *outcome) conflicts() int { return strings.Count("\n"+o.Told, "\nCONFLICT: ") }

// example is the running Python program.
type example struct {
	in     io.Writer
	out    *bufio.Reader
	stderr bytes.Buffer
}

func startExample(t *testing.T) *example {
	t.Helper()
	cmd := exec.Command("python3", "-c", drive)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	x := &example{}
	cmd.Stderr = &x.stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("example: %v\n%s", err, &x.stderr)
		}
	})
	x.in, x.out = in, bufio.NewReader(out)
	return x
}

// fatal is what the tests of testing and of rapid have in common.
type fatal interface {
	Helper()
	Fatalf(format string, args ...any)
}

func (x *example) fold(t fatal, messages []message, runs []string) (o outcome) {
	t.Helper()
	request, err := json.Marshal(map[string]any{"messages": messages, "runs": runs})
	if err == nil {
		_, err = x.in.Write(append(request, '\n'))
	}
	var answer []byte
	if err == nil {
		answer, err = x.out.ReadBytes('\n')
	}
	if err == nil {
		err = json.Unmarshal(answer, &o)
	}
	if err != nil {
		t.Fatalf("example: %v\n%s", err, &x.stderr)
	}
	return o
}

func onWire(records ...record.Record) []message {
	list := []message{}
	for _, r := range records {
		list = append(list, message{record.Topics{}.Of(&r), r.AppendCloudEvent(nil)})
	}
	return list
}

// compare has both fold the messages in this order, each in a transaction of its own. runs are sources without branch.
func compare(t *testing.T, x *example, messages []message, runs ...string) outcome {
	t.Helper()
	f := openNew(t, Options{})
	var want outcome
	conflicts := 0
	for _, m := range messages {
		r, err := f.Apply(t.Context(), []Arrived{Arrive(record.Topics{}, m.Topic, m.Payload)})
		if err != nil {
			t.Fatal(err)
		}
		conflicts += r.Conflicts
	}
	v := verify(t, f)
	want.Records, want.Malformed = v.Records, v.Malformed
	for _, run := range runs {
		part := strings.Split(run, "/")
		s, err := f.Show(t.Context(), part[2], part[3], part[1])
		if err != nil {
			t.Fatal(err)
		}
		want.Shown = append(want.Shown, string(s.AppendJSON(nil)))
	}
	got := x.fold(t, messages, runs)
	if !slices.Equal(got.Shown, want.Shown) {
		t.Errorf("the example shows\n%s\nwant\n%s", strings.Join(got.Shown, "\n"), strings.Join(want.Shown, "\n"))
	}
	if got.Records != want.Records || got.Malformed != want.Malformed || got.conflicts() != conflicts {
		t.Errorf("the example has %d records, %d malformed, %d conflicts; want %d, %d, %d\n%s",
			got.Records, got.Malformed, got.conflicts(), want.Records, want.Malformed, conflicts, got.Told)
	}
	return got
}

func TestExampleConsumerFollowsTheRule(t *testing.T) {
	x := startExample(t)
	started, second := ev("A", 1, 0), ev("A", 2, 1)
	poison := mark(second, "poison")
	for _, c := range []struct {
		name      string
		in        []record.Record
		shown     string // must be in what is shown
		conflicts int
	}{
		{"duplicates", []record.Record{started, second, started, second, second}, `"lsn":2,"records"`, 0},
		{"out of order", []record.Record{ev("A", 3, 2), second, started}, `"lsn":3,"records"`, 0},
		{"a gap", []record.Record{started, ev("A", 3, 2)}, `"lsn":1,"records"`, 0},
		{
			"a branch before its opened, which undoes a record that came",
			[]record.Record{ev("B", 4, 3, gen(2, 1)), started, second, ev("A", 3, 2), opened("B", "A", 2, 2, gen(2, 1))},
			`"branch":"` + ulid("B") + `","lsn":4,"records"`, 0,
		},
		{"an opened that never came", []record.Record{ev("B", 4, 3, gen(2, 1)), started, second}, `"branch":"` + ulid("A") + `"`, 0},
		{"generations are numbers", []record.Record{started, opened("C", "A", 1, 1, gen(9, 1)), opened("B", "A", 1, 1, gen(10, 1))}, `"branch":"` + ulid("B") + `"`, 0},
		{"epochs are numbers", []record.Record{started, opened("C", "A", 1, 1, gen(2, 9)), opened("B", "A", 1, 1, gen(2, 10))}, `"branch":"` + ulid("B") + `"`, 0},
		{"a restore that is seen on another run", []record.Record{started, second, ev("R", 1, 0, run("r2"), gen(1, 2))}, `"branch":"","lsn":0,"records":[]`, 0},
		{"a mark alone", []record.Record{started, poison, ev("A", 3, 2)}, `"type":"postrider.record.dead"`, 0},
		{"a mark, then its record", []record.Record{started, poison, second}, `"lsn":2,"type":"counted"`, 0},
		{"a record, then its mark", []record.Record{started, second, poison}, `"lsn":2,"type":"counted"`, 0},
		{"two marks", []record.Record{started, poison, mark(second, "lost")}, `"type":"postrider.record.dead"`, 0},
		{"a conflict", []record.Record{started, second, later(second), second, later(second)}, `"lsn":2,"type":"counted"`, 1},
		{"a conflict in place and time only", []record.Record{started, second, ev("A", 2, 0), ev("A", 2, 1, func(r *record.Record) { r.Occurred++ })}, "", 2},
		{"a conflict beside a mark", []record.Record{started, poison, later(second), second}, `"lsn":2,"type":"counted"`, 1},
		{"a subject is content", []record.Record{started, second, ev("A", 2, 1, func(r *record.Record) { r.Subject = "s" })}, "", 1},
		{"data as it came", []record.Record{ev("A", 1, 0, data(`{ "a" : 1e2,  "data":["<\u00e9&>"] , "n": 12345678901234567890 }`))}, `"data":{ "a" : 1e2,  "data":["<\u00e9&>"] , "n": 12345678901234567890 }}`, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := onWire(c.in...)
			for range 2 {
				got := compare(t, x, in, "/n1/acme/r1")
				if n := got.conflicts(); n != c.conflicts {
					t.Errorf("%d conflicts were told of, want %d", n, c.conflicts)
				}
				if !strings.Contains(got.Shown[0], c.shown) {
					t.Errorf("shown %s, want %s in it", got.Shown[0], c.shown)
				}
				slices.Reverse(in)
			}
		})
	}
}

// All that is on the wire, on the topic of a run's events: what is no event there is set aside, and stops nothing.
func TestExampleConsumerReadsTheWire(t *testing.T) {
	x := startExample(t)
	files, err := filepath.Glob("../testdata/wire/*.json")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	topic := record.Topics{}.Events("default", "edge-1", "order-9")
	var in []message
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		in = append(in, message{topic, b})
	}
	event, err := os.ReadFile("../testdata/wire/event.json")
	if err != nil {
		t.Fatal(err)
	}
	spaced := bytes.ReplaceAll(event, []byte(`,"`), []byte(" ,\r\n\t\""))
	for _, odd := range []string{
		"", "{", "[]", "null", "{}", `"}"`, "[" + string(event) + "]", string(event) + "x", string(event[:len(event)-1]), "\xff",
		strings.Repeat("[", 100_000), strings.Replace(string(event), `"id":"3"`, `"id":"99999999999999999999"`, 1),
		strings.Replace(string(event), `"type":"counted"`, `"type":"\ud800"`, 1), strings.Replace(string(event), `,"data":{"n":3}`, "", 1),
		strings.Replace(string(event), `"counted"`, `"postrider.branch.opened"`, 1),
	} {
		in = append(in, message{topic, []byte(odd)})
	}
	in = append(in, message{topic, spaced}, // the same event
		message{record.Topics{}.Events("default", "edge-2", "order-9"), event},
		message{record.Topics{}.Events("acme", "edge-1", "order-9"), event},
		message{"postrider/v1/default/events/7/.+/order-9", event},
		message{"postrider/v1/nodes/edge-1/state", event})
	for range 2 {
		got := compare(t, x, in, "/edge-1/default/order-9")
		if got.Malformed < 20 || got.Records < 3 {
			t.Errorf("%+v", got)
		}
		slices.Reverse(in)
	}
	// From the wire to the page, byte for byte, whatever stands between the attributes.
	full := strings.Replace(string(spaced), `"prevlsn":"2"`, `"prevlsn":"0"`, 1)
	full = strings.NewReplacer(`"id":"3"`, `"id":"1"`, "0000000003", "0000000001", `{"n":3}`, `{ "n" : 3.00 }`).Replace(full)
	if got := compare(t, x, []message{{topic, []byte(full)}}, "/edge-1/default/order-9"); !strings.Contains(got.Shown[0], `"data":{ "n" : 3.00 }`) {
		t.Errorf("%s from %s", got.Shown, full)
	}
}

// Whatever histories of runs, rewinds and restores there are, marks and conflicts among them, in any order, with
// duplicates and with a part missing: the example shows what the fold shows.
func TestExampleConsumerComesToTheSame(t *testing.T) {
	x, dir := startExample(t), t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		h := newHistory(t, "n1")
		list, _ := spoil(t, h.sent())
		list = rapid.Permutation(withDuplicates(t, list)).Draw(t, "order")
		list = list[:rapid.IntRange(0, len(list)).Draw(t, "arrived")]

		f := tempFold(t, dir)
		defer f.remove()
		f.apply(t, list)
		runs, want := []string{}, []string{}
		for _, name := range []string{"r1", "r2"} {
			if s, err := f.Show(t.Context(), "acme", name, "n1"); err == nil {
				runs, want = append(runs, "/n1/acme/"+name), append(want, string(s.AppendJSON(nil)))
			}
		}
		got := x.fold(t, onWire(list...), runs)
		if !slices.Equal(got.Shown, want) {
			t.Fatalf("the example shows\n%s\nwant\n%s", strings.Join(got.Shown, "\n"), strings.Join(want, "\n"))
		}
		if v := verifyRapid(t, f.Fold); got.Records != v.Records || got.Malformed != 0 {
			t.Fatalf("the example has %d records, %d malformed, want %d, 0\n%s", got.Records, got.Malformed, v.Records, got.Told)
		}
	})
}
