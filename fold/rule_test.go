package fold

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// counts is what Verify must say, but for runs, records and duplicates.
type counts struct{ gaps, parked, conflicts, holes, abandoned int64 }

func countsOf(v *Verification) counts {
	return counts{v.Gaps, v.Parked, v.Conflicts, v.Holes, v.Abandoned}
}

func later(r record.Record) record.Record {
	r.Data = []byte(`{"other": true}`)
	return r
}

// TestRule has each sentence of the fold rule. Every case is applied in one batch and backwards one by one, and must
// come to the same.
func TestRule(t *testing.T) {
	started := ev("A", 1, 0)
	for _, c := range []struct {
		name string
		in   []record.Record
		show string // "": depends on hashes, and so do the counts but conflicts
		want counts
	}{
		{"a run in order", []record.Record{started, ev("A", 2, 1), ev("A", 3, 2)}, "A 3: A.1 A.2 A.3", counts{}},
		{"LSNs of commands are no gaps", []record.Record{started, ev("A", 4, 1), ev("A", 9, 4)}, "A 9: A.1 A.4 A.9", counts{}},
		{
			"shown up to the first gap, the rest is parked",
			[]record.Record{started, ev("A", 3, 2), ev("A", 4, 3)},
			"A 1: A.1", counts{gaps: 1, parked: 2},
		}, {
			"every gap is counted",
			[]record.Record{started, ev("A", 3, 2), ev("A", 4, 3), ev("A", 6, 5)},
			"A 1: A.1", counts{gaps: 2, parked: 3},
		}, {
			"an event in between that its successor does not know is a gap",
			[]record.Record{started, ev("A", 2, 1), ev("A", 3, 1)},
			"A 2: A.1 A.2", counts{gaps: 1, parked: 1},
		}, {
			"a branch without its root is not known: a gap",
			[]record.Record{ev("A", 2, 1), ev("A", 3, 2)},
			" 0:", counts{gaps: 1, parked: 2},
		}, {
			"a mark at LSN 1 is a root too",
			[]record.Record{mark(started, "lost"), ev("A", 2, 1)}, "A 2: A.1 A.2", counts{},
		}, {
			"a rewind cuts the parent at the fork",
			[]record.Record{started, ev("A", 2, 1), ev("A", 3, 2), opened("B", "A", 2, 2, gen(2, 1)), ev("B", 4, 3, gen(2, 1))},
			"B 4: A.1 A.2 B.3 B.4", counts{abandoned: 1},
		}, {
			"prevlsn goes across the fork, over LSNs of commands",
			[]record.Record{started, ev("A", 2, 1), opened("B", "A", 5, 2, gen(2, 1))},
			"B 6: A.1 A.2 B.6", counts{},
		}, {
			"a gap in the parent's kept prefix parks the child",
			[]record.Record{started, ev("A", 3, 2), opened("B", "A", 3, 3, gen(2, 1))},
			"B 1: A.1", counts{gaps: 1, parked: 2},
		}, {
			"a missing end of the kept prefix is a gap",
			[]record.Record{started, opened("B", "A", 2, 2, gen(2, 1))},
			"B 1: A.1", counts{gaps: 1, parked: 1},
		}, {
			"a branch that would be live but is not known is a loss, not an abandoned one",
			[]record.Record{started, ev("A", 2, 1), ev("B", 4, 3, gen(2, 1))},
			"A 2: A.1 A.2", counts{gaps: 1, parked: 1},
		}, {
			"a branch that is not known and would not be live is abandoned",
			[]record.Record{started, ev("B", 4, 3, gen(2, 1)), opened("C", "A", 1, 1, gen(3, 1))},
			"C 2: A.1 C.2", counts{abandoned: 1},
		}, {
			"an opened branch whose parent never came has a gap before it",
			[]record.Record{opened("B", "A", 2, 2, gen(2, 1))}, "B 0:", counts{gaps: 1, parked: 1},
		}, {
			"a generation that was withheld is no gap",
			[]record.Record{started, opened("C", "A", 1, 1, gen(3, 1))}, "C 2: A.1 C.2", counts{},
		}, {
			"forks on ancestors: only the chain of the live branch counts",
			[]record.Record{
				started, ev("A", 2, 1), ev("A", 3, 2),
				opened("B", "A", 2, 2, gen(2, 1)), ev("B", 4, 3, gen(2, 1)),
				opened("C", "A", 1, 1, gen(3, 1)), ev("C", 3, 2, gen(3, 1)),
				opened("D", "C", 2, 2, gen(4, 1)),
			},
			"D 3: A.1 C.2 D.3", counts{abandoned: 5},
		}, {
			"a fork before the parent's own fork cuts the grandparent there",
			[]record.Record{started, ev("A", 2, 1), ev("A", 3, 2), opened("B", "A", 3, 3, gen(2, 1)), opened("C", "B", 1, 1, gen(3, 1))},
			"C 2: A.1 C.2", counts{abandoned: 3},
		}, {
			"generations are compared as numbers",
			[]record.Record{started, opened("C", "A", 1, 1, gen(9, 1)), opened("B", "A", 1, 1, gen(10, 1))},
			"B 2: A.1 B.2", counts{abandoned: 1},
		}, {
			"the epoch goes before the generation",
			[]record.Record{started, opened("C", "A", 1, 1, gen(9, 1)), opened("B", "A", 1, 1, gen(2, 10))},
			"B 2: A.1 B.2", counts{abandoned: 1},
		}, {
			"of equal epoch and generation the greater ULID is live",
			[]record.Record{started, opened("C", "A", 1, 1, gen(2, 1)), opened("B", "A", 1, 1, gen(2, 1))},
			"C 2: A.1 C.2", counts{abandoned: 1},
		}, {
			"a higher epoch of the node, seen on any run, abandons what it has not taken over",
			[]record.Record{started, ev("A", 2, 1), ev("R", 1, 0, run("r2"), gen(1, 2))},
			" 0:", counts{abandoned: 2},
		}, {
			"the lineage of a branch of the higher epoch is kept",
			[]record.Record{started, ev("A", 2, 1), ev("A", 3, 2), opened("B", "A", 2, 2, gen(2, 2)), ev("R", 1, 0, run("r2"), gen(1, 2))},
			"B 3: A.1 A.2 B.3", counts{abandoned: 1},
		}, {
			"a branch that is its own ancestor ends there",
			[]record.Record{started, opened("B", "C", 1, 1, gen(2, 1)), opened("C", "B", 1, 1, gen(3, 1))},
			"C 0:", counts{gaps: 1, parked: 1, abandoned: 2},
		}, {
			"a mark stands in an event's place",
			[]record.Record{started, mark(ev("A", 2, 1), "poison"), ev("A", 3, 2)}, "A 3: A.1 A.2 A.3", counts{},
		}, {
			"a record replaces a mark",
			[]record.Record{started, mark(ev("A", 2, 1), "poison"), ev("A", 2, 1)}, "A 2: A.1 A.2", counts{},
		}, {
			"of two marks neither is a conflict",
			[]record.Record{started, mark(ev("A", 2, 1), "poison"), mark(ev("A", 2, 1), "lost")}, "A 2: A.1 A.2", counts{},
		}, {
			"other content under the same key is a conflict, however often",
			[]record.Record{started, ev("A", 2, 1), later(ev("A", 2, 1)), ev("A", 2, 1, data("3"))},
			"A 2: A.1 A.2", counts{conflicts: 1},
		}, {
			"another place in the lineage is a conflict too",
			[]record.Record{started, ev("A", 2, 1), ev("A", 3, 2), ev("A", 3, 1)}, "", counts{conflicts: 1},
		}, {
			"a conflict on an abandoned branch is told as well",
			[]record.Record{started, ev("A", 2, 1), later(ev("A", 2, 1)), opened("B", "A", 1, 1, gen(2, 1))},
			"B 2: A.1 B.2", counts{conflicts: 1, abandoned: 1},
		}, {
			"of two openings the smaller hash counts",
			[]record.Record{started, ev("A", 2, 1), opened("B", "A", 2, 2, gen(2, 1)), opened("B", "X", 2, 2, gen(2, 1))},
			"", counts{conflicts: 1},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var dumps, shows []string
			for _, backwards := range []bool{false, true} {
				in, size := slices.Clone(c.in), len(c.in)
				if backwards {
					slices.Reverse(in)
					size = 1
				}
				f := openNew(t, Options{})
				for part := range slices.Chunk(in, size) {
					apply(t, f, part...)
				}
				v := verify(t, f)
				if c.show != "" && countsOf(v) != c.want {
					t.Errorf("backwards %v: verify says %+v, want %+v", backwards, countsOf(v), c.want)
				}
				if v.Conflicts != c.want.conflicts {
					t.Errorf("conflicts: %d, want %d", v.Conflicts, c.want.conflicts)
				}
				shows = append(shows, show(t, f, "r1"))
				dumps = append(dumps, dump(t, f))
			}
			if c.show != "" && shows[0] != c.show {
				t.Errorf("shown %q, want %q", shows[0], c.show)
			}
			if dumps[0] != dumps[1] || shows[0] != shows[1] {
				t.Errorf("order of arrival matters:\n%s\n%s", dumps[0], dumps[1])
			}
		})
	}
}

func TestRedeliveryChangesNothingButItsCounter(t *testing.T) {
	f := openNew(t, Options{})
	batch := []record.Record{ev("A", 1, 0), ev("A", 2, 1), mark(ev("A", 3, 2), "poison"), ev("A", 3, 2), later(ev("A", 2, 1))}
	apply(t, f, batch...)
	before := dump(t, f)
	if res := apply(t, f, append(batch, batch...)...); res != (Result{Duplicates: 10}) {
		t.Errorf("redelivery: %+v", res)
	}
	if after := dump(t, f); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	if v := verify(t, f); v.Duplicates != 10 || v.Records != 3 {
		t.Errorf("%+v", v)
	}
}

// White space around the data and a later recordedtime do not make another record.
func TestContentIsWhatTheHashCovers(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0))
	res := apply(t, f, ev("A", 1, 0, func(r *record.Record) { r.Recorded++ }))
	if res != (Result{Duplicates: 1}) {
		t.Errorf("%+v", res)
	}
}

func TestShownContentDoesNotDependOnOrder(t *testing.T) {
	a, b := ev("A", 2, 1), later(ev("A", 2, 1))
	m1, m2 := mark(a, "poison"), mark(a, "lost")
	least := func(x, y record.Record) record.Record {
		hx, hy := record.ContentHash(&x), record.ContentHash(&y)
		if bytes.Compare(hx[:], hy[:]) < 0 {
			return x
		}
		return y
	}
	for _, c := range []struct {
		in   []record.Record
		want record.Record
		res  Result // of all but the first
	}{
		{[]record.Record{a, b}, least(a, b), Result{Conflicts: 1}},
		{[]record.Record{b, a}, least(a, b), Result{Conflicts: 1}},
		{[]record.Record{m1, m2}, least(m1, m2), Result{Marks: 1}},
		{[]record.Record{m2, m1}, least(m1, m2), Result{Marks: 1}},
		{[]record.Record{m1, a}, a, Result{Marks: 1}},
		{[]record.Record{a, m1}, a, Result{Marks: 1}},
		{[]record.Record{m1, b, m2, a}, least(a, b), Result{Marks: 2, Conflicts: 1}},
	} {
		f := openNew(t, Options{})
		apply(t, f, ev("A", 1, 0), c.in[0])
		if res := apply(t, f, c.in[1:]...); res != c.res {
			t.Errorf("%+v, want %+v", res, c.res)
		}
		s, err := f.Show(t.Context(), "acme", "r1", "")
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Records[1]; got.Type != c.want.Type || string(got.Data) != string(c.want.Data) {
			t.Errorf("shown %s %s, want %s %s", got.Type, got.Data, c.want.Type, c.want.Data)
		}
		var n int
		if err := f.store.Reader().QueryRow("SELECT count(*) FROM record WHERE lsn = 2").Scan(&n); err != nil || n != len(c.in) {
			t.Errorf("%d contents are kept, want %d (%v)", n, len(c.in), err)
		}
	}
}

func TestConflictIsReported(t *testing.T) {
	var lines strings.Builder
	reg := prometheus.NewPedanticRegistry()
	f := openNew(t, Options{Logger: slog.New(slog.NewTextHandler(&lines, nil)), Metrics: reg})
	apply(t, f, ev("A", 1, 0), ev("A", 2, 1), ev("A", 2, 1))
	if verify(t, f).OK() != true || lines.Len() > 0 {
		t.Fatalf("reported too early: %s", lines.String())
	}
	apply(t, f, later(ev("A", 2, 1)))
	apply(t, f, later(ev("A", 2, 1))) // a redelivery of what is known
	v := verify(t, f)
	want := Finding{What: "conflict", Tenant: "acme", Node: "n1", Run: "r1", Branch: ulid("A"), LSN: 2, Contents: 2}
	if v.OK() || v.Conflicts != 1 || len(v.Findings) != 1 || v.Findings[0] != want {
		t.Errorf("verify: %+v", v)
	}
	if s := lines.String(); strings.Count(s, "level=ERROR") != 1 || !strings.Contains(s, "branch="+ulid("A")) || !strings.Contains(s, "lsn=2") {
		t.Errorf("log: %s", s)
	}
	for name, want := range map[string]float64{"conflicts_total": 1, "duplicates_total": 2, "records_total": 2, "malformed_total": 0, "connected": 0} {
		if got := metric(t, reg, "postrider_fold_"+name); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if problems, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}

func TestGapIsReportedWithItsPlace(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0), ev("A", 2, 1), opened("B", "A", 4, 4, gen(2, 1)), ev("B", 8, 6, gen(2, 1)), ev("Z", 7, 6, run("r0"), gen(2, 1)))
	want := []Finding{
		{What: "gap", Tenant: "acme", Node: "n1", Run: "r0", Branch: ulid("Z"), After: 0, Missing: 6, LSN: 7},
		{What: "gap", Tenant: "acme", Node: "n1", Run: "r1", Branch: ulid("B"), After: 2, Missing: 4, LSN: 5},
		{What: "gap", Tenant: "acme", Node: "n1", Run: "r1", Branch: ulid("B"), After: 5, Missing: 6, LSN: 8},
	}
	if v := verify(t, f); !slices.Equal(v.Findings, want) || v.Gaps != 3 || v.Parked != 3 {
		t.Errorf("%+v", v)
	}
}

func TestHoleSatisfiesWhatPointsIntoIt(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0), ev("A", 9, 8), opened("B", "A", 12, 12, gen(2, 1)), ev("B", 14, 13, gen(2, 1)))
	hole := func(branch string, lo, hi int64) {
		if err := f.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
			_, _, err := tx.Exec(ctx, "INSERT INTO hole (branch, lo, hi, at_us) SELECT id, ?, ?, 0 FROM branch WHERE ulid = ?", lo, hi, ulid(branch))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct {
		branch string
		lo, hi int64
		show   string
		want   counts
	}{
		{"A", 2, 7, "B 1: A.1", counts{gaps: 2, parked: 3, holes: 1}}, // 8 is not in it
		{"A", 8, 8, "B 9: A.1 A.9", counts{gaps: 1, parked: 2, holes: 2}},
		{"B", 12, 12, "B 9: A.1 A.9", counts{gaps: 1, parked: 2, holes: 3}}, // LSN 12 of the lineage is on A
		{"A", 10, 20, "B 14: A.1 A.9 B.13 B.14", counts{holes: 4}},
	} {
		hole(step.branch, step.lo, step.hi)
		if v := verify(t, f); countsOf(v) != step.want {
			t.Errorf("after hole %s %d-%d: %+v, want %+v", step.branch, step.lo, step.hi, countsOf(v), step.want)
		}
		if got := show(t, f, "r1"); got != step.show {
			t.Errorf("after hole %s %d-%d: %q, want %q", step.branch, step.lo, step.hi, got, step.show)
		}
	}
}

// What heads will say, once they are taken in: the schema is laid for it.
func TestHeadsKeepALowerEpochAndTellALostTail(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0), ev("A", 2, 1), ev("R", 1, 0, run("r2"), gen(1, 2)))
	set := func(assign string) {
		if err := f.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
			_, _, err := tx.Exec(ctx, "UPDATE branch SET "+assign+" WHERE ulid = ?", ulid("A"))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if got := show(t, f, "r1"); got != " 0:" {
		t.Errorf("before: %q", got)
	}
	set("kept_epoch = 2, heads_seq = 7, heads_live = 1, heads_lsn = 2")
	if got, v := show(t, f, "r1"), verify(t, f); got != "A 2: A.1 A.2" || !v.OK() {
		t.Errorf("kept: %q %+v", got, v)
	}
	// What is kept ranks below every branch of the epoch that kept it, whatever its generation.
	apply(t, f, ev("C", 1, 0, run("r3"), gen(9, 1)), ev("B", 1, 0, run("r3"), gen(2, 2)))
	if err := f.store.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		_, _, err := tx.Exec(ctx, "UPDATE branch SET kept_epoch = 2 WHERE ulid = ?", ulid("C"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if got := show(t, f, "r3"); got != "B 1: B.1" {
		t.Errorf("kept beside one of the epoch: %q", got)
	}
	set("heads_lsn = 5")
	v := verify(t, f)
	want := Finding{What: "gap", Tenant: "acme", Node: "n1", Run: "r1", Branch: ulid("A"), After: 2, Missing: 5}
	if v.Gaps != 1 || v.Parked != 0 || v.Findings[0] != want {
		t.Errorf("lost tail: %+v", v)
	}
}

func TestShowNamesTheNodesOfARun(t *testing.T) {
	f := openNew(t, Options{})
	onN2 := func(r *record.Record) { r.Node, r.Key.Branch = "n2", ulid("B") }
	apply(t, f, ev("A", 1, 0), ev("A", 1, 0, onN2), ev("A", 2, 1, onN2))
	_, err := f.Show(t.Context(), "acme", "r1", "")
	var several *AmbiguousError
	if !errors.As(err, &several) || !slices.Equal(several.Nodes, []string{"n1", "n2"}) || !strings.Contains(err.Error(), "n1, n2") {
		t.Errorf("several nodes: %v", err)
	}
	s, err := f.Show(t.Context(), "acme", "r1", "n2")
	if err != nil || s.Node != "n2" || s.LSN != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	for _, q := range [][3]string{{"acme", "r1", "n3"}, {"acme", "r2", ""}, {"other", "r1", ""}} {
		if _, err := f.Show(t.Context(), q[0], q[1], q[2]); !errors.Is(err, ErrNotFound) {
			t.Errorf("%v: %v", q, err)
		}
	}
}

// Isolation: the same run and branch names of another tenant or node are other runs.
func TestTenantsAndNodesDoNotMeet(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0), ev("A", 1, 0, data("1"), func(r *record.Record) { r.Key.Tenant = "other" }),
		ev("A", 1, 0, data("2"), func(r *record.Record) { r.Node = "n2" }), ev("A", 1, 0, data("3"), run("r2")))
	if v := verify(t, f); v.Runs != 4 || v.Records != 4 || !v.OK() {
		t.Errorf("%+v", v)
	}
}

func TestShowWritesDataAsItCame(t *testing.T) {
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0, data(`{ "a" : 1e2,  "b":"<\u00e9&>" , "n": 12345678901234567890 }`)),
		ev("A", 2, 1, func(r *record.Record) { r.Type, r.Data = "a<\"\n>", nil }))
	s, err := f.Show(t.Context(), "acme", "r1", "")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := s.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	want := `{"tenant":"acme","node":"n1","run":"r1","branch":"` + ulid("A") + `","lsn":2,"records":[` +
		`{"branch":"` + ulid("A") + `","lsn":1,"type":"postrider.run.started","data":{ "a" : 1e2,  "b":"<\u00e9&>" , "n": 12345678901234567890 }},` +
		`{"branch":"` + ulid("A") + `","lsn":2,"type":"a<\"\n>","data":null}]}` + "\n"
	if b.String() != want {
		t.Errorf("got  %swant %s", b.String(), want)
	}
}

func TestHeld(t *testing.T) {
	f := openNew(t, Options{})
	key := ev("A", 1, 0).Key
	held := func() int64 {
		lsn, err := f.Held(t.Context(), "n1", key)
		if err != nil {
			t.Fatal(err)
		}
		return lsn
	}
	if n := held(); n != 0 {
		t.Errorf("held %d of nothing", n)
	}
	apply(t, f, ev("A", 1, 0), ev("A", 7, 6), ev("A", 3, 2), ev("B", 9, 8))
	if n := held(); n != 7 {
		t.Errorf("held %d, want 7", n)
	}
}

func TestMalformedIsSetAsideAndBounded(t *testing.T) {
	f := openNew(t, Options{})
	const topic = "postrider/v1/acme/events/0/n1/r1"
	command := ev("A", 2, 1)
	command.Kind = record.Command
	wrongFork := opened("B", "A", 2, 2, gen(2, 1))
	wrongFork.LSN = 9
	ownParent := opened("B", "B", 2, 2, gen(2, 1))
	notOpened := opened("B", "A", 2, 2, gen(2, 1), data("{}"))
	notOpened.Data = []byte(`{}`)
	batch := []Arrived{
		{Topic: topic, Payload: bytes.Repeat([]byte("x"), 5000), Err: errors.New("no JSON")}, {Record: command},
		{Record: wrongFork}, {Record: ownParent}, {Record: notOpened}, {Topic: topic, Err: errors.New("empty")}, {Record: ev("A", 1, 0)},
	}
	res, err := f.Apply(t.Context(), batch)
	if err != nil || res != (Result{Stored: 1, Malformed: 6}) {
		t.Fatalf("%+v, %v", res, err)
	}
	var size, kept int
	if err := f.store.Reader().QueryRow("SELECT size, length(payload) FROM malformed WHERE reason = 'no JSON' AND topic = ?", topic).Scan(&size, &kept); err != nil || size != 5000 || kept != 1024 {
		t.Errorf("size %d, kept %d, %v", size, kept, err)
	}
	flood := make([]Arrived, 3000)
	for i := range flood {
		flood[i].Err = fmt.Errorf("flood %d", i)
	}
	if _, err := f.Apply(t.Context(), flood); err != nil {
		t.Fatal(err)
	}
	var n int
	var last string
	if err := f.store.Reader().QueryRow("SELECT count(*), (SELECT reason FROM malformed ORDER BY id DESC LIMIT 1) FROM malformed").Scan(&n, &last); err != nil || n != maxMalformed || last != "flood 2999" {
		t.Errorf("%d are kept, the last one is %q, %v", n, last, err)
	}
	if v := verify(t, f); v.Malformed != 3006 || !v.OK() {
		t.Errorf("%+v", v)
	}
}

func TestArriveChecksTopicAndRecord(t *testing.T) {
	topics := record.Topics{Root: "x/y"}
	r := ev("A", 1, 0)
	good := topics.Of(&r)
	wire := r.AppendCloudEvent(nil)
	if a := Arrive(topics, good, wire); a.Err != nil || a.Record.Key != r.Key || a.Record.LSN != 1 || string(a.Record.Data) != string(r.Data) {
		t.Errorf("%+v", a)
	}
	other := ev("A", 1, 0, run("r2"))
	for _, c := range []struct {
		what, topic string
		payload     []byte
	}{
		{"of another run", topics.Of(&other), wire},
		{"of another tenant", topics.Events("other", "n1", "r1"), wire},
		{"of another node", topics.Events("acme", "n2", "r1"), wire},
		{"cut", good, wire[:len(wire)-1]},
		{"empty", good, nil},
		{"on no topic of ours", "x/y/v1/acme/events", wire},
		{"in the wrong part", strings.Replace(good, fmt.Sprint("/", record.Partition("acme", "r1"), "/"), "/99/", 1), wire},
	} {
		if a := Arrive(topics, c.topic, c.payload); a.Err == nil || a.Topic != c.topic || string(a.Payload) != string(c.payload) {
			t.Errorf("%s: %+v", c.what, a)
		}
	}
}

func TestBatchIsAllOrNothing(t *testing.T) {
	broken := false
	f := openNew(t, Options{Store: failOn("INSERT INTO malformed", func() bool { return broken })})
	apply(t, f, ev("A", 1, 0))
	before := dump(t, f)
	broken = true
	batch := append(arrived([]record.Record{ev("A", 1, 0), ev("A", 2, 1), ev("B", 7, 6, gen(3, 9))}), Arrived{Err: errors.New("x")})
	if _, err := f.Apply(t.Context(), batch); !errors.Is(err, errDiskFull) {
		t.Fatalf("apply: %v", err)
	}
	if after := dump(t, f); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	// Nothing of it may have stayed in memory either: the rows of branch B and of epoch 9 are not there.
	broken = false
	if res, err := f.Apply(t.Context(), batch); err != nil || res != (Result{Stored: 2, Duplicates: 1, Malformed: 1}) {
		t.Errorf("again: %+v, %v", res, err)
	}
	if v := verify(t, f); v.Duplicates != 1 || v.Records != 3 {
		t.Errorf("%+v", v)
	}
}

func TestNameAndClientIDAreMadeOnce(t *testing.T) {
	path := t.TempDir() + "/fold.db"
	f := openAt(t, path, Options{})
	name, id := f.Name(), f.ClientID()
	if err := record.CheckName(name); err != nil || !strings.HasPrefix(name, hostName()+"-") || !strings.HasPrefix(id, "postrider-fold-") {
		t.Errorf("name %q, client id %q: %v", name, id, err)
	}
	f.Close()
	f = openAt(t, path, Options{Name: name})
	if f.Name() != name || f.ClientID() != id {
		t.Errorf("%q %q after reopening", f.Name(), f.ClientID())
	}
	f.Close()
	if _, err := Open(t.Context(), path, Options{Name: "other"}); err == nil || !strings.Contains(err.Error(), name) {
		t.Errorf("another name: %v", err)
	}
	a, b := openNew(t, Options{Name: "same"}), openNew(t, Options{Name: "same"})
	if a.Name() != "same" || a.ClientID() == b.ClientID() {
		t.Errorf("two databases of one name: %q %q", a.ClientID(), b.ClientID())
	}
	if _, err := Open(t.Context(), t.TempDir()+"/x.db", Options{Name: "a/b"}); err == nil {
		t.Error("a name with a slash was taken")
	}
}

func TestReadingMakesNoDatabase(t *testing.T) {
	path := t.TempDir() + "/fold.db"
	if _, err := Open(t.Context(), path, Options{Store: sqlite.Options{ReadOnly: true}}); !errors.Is(err, sqlite.ErrNotFound) {
		t.Errorf("missing: %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was made: %v", err)
	}
	f := openNew(t, Options{})
	apply(t, f, ev("A", 1, 0))
	reader, err := Open(t.Context(), f.store.Path(), Options{Store: sqlite.Options{ReadOnly: true}})
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if got := show(t, reader, "r1"); got != "A 1: A.1" {
		t.Errorf("shown %q", got)
	}
	if _, err := reader.Apply(t.Context(), arrived([]record.Record{ev("A", 2, 1)})); err == nil {
		t.Error("a reader has written")
	}
}
