package fold

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", rapidChecks); err != nil { // before Parse: the command line wins
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// openAt opens or makes the fold database at path; the caller closes it.
func openAt(t testing.TB, path string, o Options) *Fold {
	t.Helper()
	o.Store.Create = true
	f, err := Open(t.Context(), path, o)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func openNew(t testing.TB, o Options) *Fold {
	t.Helper()
	f := openAt(t, t.TempDir()+"/fold.db", o)
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func apply(t testing.TB, f *Fold, records ...record.Record) Result {
	t.Helper()
	res, err := f.Apply(context.Background(), arrived(records))
	if err != nil {
		t.Fatal(err)
	}
	if sum := res.Stored + res.Duplicates + res.Conflicts + res.Marks + res.Malformed; sum != len(records) {
		t.Fatalf("%+v adds up to %d of %d records", res, sum, len(records))
	}
	return res
}

func arrived(records []record.Record) []Arrived {
	list := make([]Arrived, len(records))
	for i, r := range records {
		list[i].Record = r
	}
	return list
}

func verify(t testing.TB, f *Fold) *Verification {
	t.Helper()
	v, err := f.Verify(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// show gives a run as "branch last LSN: branch.lsn branch.lsn …", branches by their last character.
func show(t testing.TB, f *Fold, run string) string {
	t.Helper()
	s, err := f.Show(context.Background(), "acme", run, "")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %d:", short(s.Branch), s.LSN)
	for _, r := range s.Records {
		fmt.Fprintf(&b, " %s.%d", short(r.Branch), r.LSN)
	}
	return b.String()
}

func short(ulid string) string { return ulid[max(len(ulid)-1, 0):] }

// ulid makes a branch's name from one letter, so that letters order as branches do.
func ulid(letter string) string { return "01" + strings.Repeat("0", 23) + letter }

// ev is an event of run r1 on branch letter, first generation and epoch unless changed.
func ev(letter string, lsn, prev int64, change ...func(*record.Record)) record.Record {
	r := record.Record{
		Node: "n1", Key: record.BranchKey{Tenant: "acme", Run: "r1", Branch: ulid(letter)}, LSN: lsn, PrevLSN: prev,
		Gen: 1, Epoch: 1, Step: lsn, Kind: record.Event, Type: "counted", Data: fmt.Appendf(nil, `{"n": %d}`, lsn),
		Occurred: 1e15 + lsn, Recorded: 1e15 + lsn,
	}
	if lsn == 1 {
		r.Type = record.TypeRunStarted
	}
	for _, c := range change {
		c(&r)
	}
	return r
}

func gen(gen, epoch int64) func(*record.Record) {
	return func(r *record.Record) { r.Gen, r.Epoch = gen, epoch }
}

func data(s string) func(*record.Record) { return func(r *record.Record) { r.Data = []byte(s) } }

func run(name string) func(*record.Record) { return func(r *record.Record) { r.Key.Run = name } }

// opened is the first record of a branch that forks from parent at LSN fork, whose last event is prev.
func opened(letter, parent string, fork, prev int64, change ...func(*record.Record)) record.Record {
	r := ev(letter, fork+1, prev, change...)
	o := record.BranchOpened{Parent: ulid(parent), ForkStep: fork, ForkLSN: fork, Reason: "rewind"}
	r.Type, r.Data = record.TypeBranchOpened, o.AppendData(nil)
	return r
}

func mark(r record.Record, reason string) record.Record {
	return r.Mark(record.Dead{Attempts: 3, Reason: reason})
}

// metric is the value of a counter or gauge.
func metric(t testing.TB, reg prometheus.Gatherer, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

var errDiskFull = fmt.Errorf("no space left")

// failOn makes statements that contain text fail while on.
func failOn(text string, on func() bool) sqlite.Options {
	return sqlite.Options{BeforeStatement: func(query string) error {
		if on() && strings.Contains(query, text) {
			return errDiskFull
		}
		return nil
	}}
}
