package outbox

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"postrider/internal/record"
)

// mixed is a box with branches in all states: shipped in part, rewound, with dead and expired records.
func mixed(t *testing.T, r *rand.Rand) *box {
	t.Helper()
	b := newBox(t)
	branches := []int64{b.root("t1"), b.root("t1"), b.root("t2"), b.root("t2"), b.root("t3")}
	live := slices.Clone(branches)
	fence := b.lease()
	for range 60 {
		i := r.IntN(len(live))
		switch k := r.IntN(12); {
		case k < 2:
			if h := b.heads[live[i]]; h.LSN > b.number("SELECT fork_lsn FROM branch WHERE id = ?", live[i]) {
				fork := b.number("SELECT fork_lsn FROM branch WHERE id = ?", live[i])
				live[i] = b.rewind(live[i], fork+1+r.Int64N(h.LSN-fork))
			}
		case k < 5:
			for _, it := range b.drain(&Cursor{}, 1+r.IntN(30)) {
				s := shippedUpTo(it)
				if r.IntN(8) == 0 {
					s.Expired = []int64{it.LSN}
				}
				if err := b.Ack(t.Context(), fence, []Shipped{s}); err != nil {
					t.Fatal(err)
				}
			}
		case k == 5: // what the relay will do to poison
			b.exec(`INSERT INTO dead (branch, lsn, reason, attempts, first_us, last_error, last_us, requeued_us)
				SELECT id, shipped, 'poison', 3, 1, 'too large', 1, ? FROM branch WHERE shipped > fork_lsn
				AND NOT EXISTS (SELECT 1 FROM dead WHERE branch = id AND lsn = shipped) ORDER BY id LIMIT 2`, []any{nil, 1}[r.IntN(2)])
		default:
			records := make([]record.Record, 1+r.IntN(40))
			for k := range records {
				records[k] = []record.Record{event("1"), message("plant/1"), command("r"), event1("other")}[r.IntN(4)]
			}
			b.add(live[i], records...)
		}
	}
	return b
}

// What is listed is what view record_state says, in order of commit, with any filter, in pages of any size.
func TestListIsTheRecordsOfTheView(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	b := mixed(t, r)
	var all []Listed
	rows, err := b.store.Reader().Query("SELECT id, tenant, run, branch, gen, lsn, step, kind, type, destination, state, recorded_us FROM record_state ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	states := map[string]int{}
	for rows.Next() {
		var l Listed
		if err := rows.Scan(&l.ID, &l.Tenant, &l.Run, &l.Branch, &l.Gen, &l.LSN, &l.Step, &l.Kind, &l.Type, &l.Destination, &l.State, &l.RecordedUS); err != nil {
			t.Fatal(err)
		}
		states[l.State]++
		all = append(all, l)
	}
	t.Logf("%d records: %v", len(all), states)
	unshipped := []string{"pending", "withheld", "dead", "expired"}
	sets := [][]string{unshipped, States, {"pending"}, {"withheld"}, {"dead"}, {"expired"}, {"shipped"}, {"dead", "pending"}}
	for range 100 {
		f := Filter{States: sets[r.IntN(len(sets))], Limit: []int{3, 7, 16, 40, 10000}[r.IntN(5)],
			Tenant: []string{"", "t1", "t2", "t9"}[r.IntN(4)], Kind: []string{"", "", "event", "command", "message"}[r.IntN(5)],
			Run: []string{"", "", "r0", "r2"}[r.IntN(4)], Type: []string{"", "", "", "e", "other"}[r.IntN(5)]}
		var want, got []int64
		for _, l := range all {
			if slices.Contains(f.States, l.State) && (f.Tenant == "" || f.Tenant == l.Tenant) && (f.Run == "" || f.Run == l.Run) &&
				(f.Kind == "" || f.Kind == l.Kind) && (f.Type == "" || f.Type == l.Type) {
				want = append(want, l.ID)
			}
		}
		for more := true; more; {
			var list []Listed
			if list, more, err = b.List(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			if len(list) > f.Limit || more && len(list) < f.Limit {
				t.Fatalf("%+v: a page of %d, more: %v", f, len(list), more)
			}
			for _, l := range list {
				got = append(got, l.ID)
				i, _ := slices.BinarySearchFunc(all, l.ID, func(a Listed, id int64) int { return int(a.ID - id) })
				l.Bytes, l.Deliveries, l.LastError, l.NextUS = 0, 0, "", 0
				if l != all[i] {
					t.Fatalf("%+v: listed %+v, want %+v", f, l, all[i])
				}
				f.After = l.ID
			}
		}
		if f.After = 0; !slices.Equal(got, want) {
			t.Fatalf("%+v lists\n\t%v, want\n\t%v", f, got, want)
		}
	}
}

// The row of the record that a branch waits with says why; records behind it do not.
func TestListSaysWhyARecordWaits(t *testing.T) {
	b := newBox(t)
	sent, unsent := b.root("t1"), b.root("t1")
	b.fill(sent, 3)
	b.fill(unsent, 2)
	fence := b.lease()
	first := b.drain(&Cursor{}, 1)[0]
	if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(first)}); err != nil || first.Branch != sent {
		t.Fatal(err)
	}
	next := time.UnixMicro(1_900_000_000_000_000)
	if err := b.Failed(t.Context(), fence, []int64{sent}, "hung up", next); err != nil {
		t.Fatal(err)
	}
	b.exec("UPDATE relay_lease SET last_error = 'unreachable'")
	list, _, err := b.List(t.Context(), Filter{States: []string{"pending"}, Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range list {
		got = append(got, fmt.Sprintf("%s %d: %d %q %v", l.Run, l.LSN, l.Deliveries, l.LastError, l.NextUS == next.UnixMicro()))
	}
	want := []string{`r0 2: 1 "hung up" true`, `r0 3: 0 "" false`, `r1 1: 0 "unreachable" true`, `r1 2: 0 "" false`}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// A backlog that Reship made begins with its first record, also for those who look for the oldest.
func TestListAfterReship(t *testing.T) {
	b := newBox(t)
	one, two := b.root("t1"), b.root("t1")
	fence := b.lease()
	for range 2 {
		for _, branch := range []int64{one, two} {
			b.fill(branch, 3)
			for _, it := range b.drainAll(&Cursor{}, 100) {
				if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(it)}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if _, err := b.Reship(t.Context(), func(context.Context, record.BranchKey) (int64, error) { return 0, nil }); err != nil {
		t.Fatal(err)
	}
	list, more, err := b.List(t.Context(), Filter{States: []string{"pending"}, Limit: 4})
	if err != nil || !more {
		t.Fatalf("more: %v, %v", more, err)
	}
	for i, l := range list {
		if l.ID != int64(i+1) {
			t.Errorf("record %d of the list has id %d", i+1, l.ID)
		}
	}
}

// Without shipped records nothing scans the table: behind a million of those a few pending ones are found at once.
func TestListScansNoTable(t *testing.T) {
	b := newBox(t)
	unshipped := []string{"pending", "withheld", "dead", "expired"}
	for name, q := range map[string]struct {
		query string
		args  int
		sort  bool // is fine: of what was found
	}{
		"all spans":    {Filter{States: unshipped}.spansQuery(), 3, true},
		"a run":        {Filter{States: States, Run: "r"}.spansQuery(), 3, true},
		"of a run":     {Filter{States: unshipped, Run: "r"}.spansQuery(), 3, true},
		"chunk":        {listQuery(chunkOfSpan), 9, true},
		"skip":         {skipQuery, 4, false},
		"with shipped": {listQuery("outbox o"), 6, false},
	} {
		rows, err := b.store.Reader().QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+q.query, []any{1, 1, 1, 1, 1, 1, 1, 1, 1}[:q.args]...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer rows.Close()
		for rows.Next() {
			var id, parent, unused int64
			var step string
			if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
				t.Fatal(err)
			}
			scanned, scan := strings.CutPrefix(step, "SCAN ")
			fine := slices.Contains([]string{"w", "walk", "s", "d", "b USING INDEX branch_backlog", "b USING INDEX branch_withheld", "CONSTANT ROW"}, scanned) ||
				strings.HasPrefix(scanned, "run USING COVERING INDEX") && q.args == 3 // of all tenants
			scan = scan || strings.Contains(step, "(rowid>?)") && name != "with shipped" // the same, in disguise
			if scan && !fine || strings.Contains(step, "TEMP B-TREE") && !q.sort {
				t.Errorf("%s: %s", name, step)
			}
		}
	}
}
