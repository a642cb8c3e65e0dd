package outbox

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestStatsAreOfOneTenantOrAll(t *testing.T) {
	b := newBox(t)
	one, two := b.root("t1"), b.root("t2")
	b.fill(one, 5)
	b.fill(two, 20)
	b.rewind(two, 3)
	items, err := b.Drain(t.Context(), "t1", new(Cursor), 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Ack(t.Context(), b.lease(), []Shipped{shippedUpTo(items[1])}); err != nil {
		t.Fatal(err)
	}
	for tenant, want := range map[string]Stats{
		"t1": {Pending: 3, Shipped: 2},
		"t2": {Pending: 4, Withheld: 17},
		"":   {Pending: 7, Shipped: 2, Withheld: 17},
		"t3": {},
	} {
		got, err := b.Stats(t.Context(), tenant)
		if err != nil {
			t.Fatal(err)
		}
		if (got.OldestUS != 0) != (want.Pending > 0) {
			t.Errorf("tenant %q: oldest %d with %d pending", tenant, got.OldestUS, got.Pending)
		}
		got.OldestUS, got.PendingBytes = 0, 0
		if got != want {
			t.Errorf("tenant %q: %+v, want %+v", tenant, got, want)
		}
	}
}

func TestBacklogIsAMetricPerTenant(t *testing.T) {
	b := newBox(t)
	one, two := b.root("t1"), b.root("t2")
	b.fill(one, 5)
	b.fill(two, 20)
	b.rewind(two, 3)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(b)
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	s, err := b.Stats(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf(`
# HELP postrider_outbox_dead_records Dead letters of the outbox.
# TYPE postrider_outbox_dead_records gauge
postrider_outbox_dead_records 0
# HELP postrider_outbox_pending_bytes Size of the pending records' contents.
# TYPE postrider_outbox_pending_bytes gauge
postrider_outbox_pending_bytes %d
# HELP postrider_outbox_pending_records Records waiting for the broker's confirmation.
# TYPE postrider_outbox_pending_records gauge
postrider_outbox_pending_records{tenant="t1"} 5
postrider_outbox_pending_records{tenant="t2"} 4
# HELP postrider_outbox_withheld_records Records that a rewind keeps from being shipped.
# TYPE postrider_outbox_withheld_records gauge
postrider_outbox_withheld_records 17
`, s.PendingBytes)
	err = testutil.GatherAndCompare(reg, strings.NewReader(want), "postrider_outbox_dead_records", "postrider_outbox_pending_bytes",
		"postrider_outbox_pending_records", "postrider_outbox_withheld_records")
	if err != nil {
		t.Error(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	oldest := 0.0
	for _, f := range families {
		if f.GetName() == "postrider_outbox_oldest_pending_timestamp_seconds" {
			for _, m := range f.GetMetric() {
				if m.GetLabel()[0].GetValue() == "t1" {
					oldest = m.GetGauge().GetValue()
				}
			}
		}
	}
	at := b.number("SELECT min(recorded_us) FROM outbox WHERE branch = ?", one)
	if d := oldest - float64(at)/1e6; d > 1e-3 || d < -1e-3 {
		t.Errorf("oldest pending of t1 at %f s, want %d µs", oldest, at)
	}
}

// The hot queries look rows up by an index and sort nothing, however big the tables are.
func TestHotQueriesScanNoTable(t *testing.T) {
	b := newBox(t)
	for name, query := range map[string]string{"backlogged": backloggedQuery, "newest": newestQuery, "candidates": candidatesQuery, "walk": walkQuery} {
		rows, err := b.store.Reader().QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+query, 1, 1, 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		steps := 0
		for ; rows.Next(); steps++ {
			var id, parent, unused int64
			var step string
			if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
				t.Fatal(err)
			}
			scan, ok := strings.CutPrefix(step, "SCAN ")
			if ok && scan != "t" && scan != "w" && scan != "walk" || strings.Contains(step, "TEMP B-TREE") { // those are CTEs
				t.Errorf("%s: %s", name, step)
			}
		}
		if err := rows.Err(); err != nil || steps == 0 {
			t.Errorf("%s: %d steps, %v", name, steps, err)
		}
	}
}
