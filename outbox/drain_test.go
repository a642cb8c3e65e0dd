package outbox

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"postrider/internal/record"
)

func TestDrainAscendsWithinEachBranch(t *testing.T) {
	for _, limit := range []int{1, 7, 1000} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			b := newBox(t)
			var branches []int64
			for i := range 6 {
				branches = append(branches, b.root([]string{"t1", "t2", "t3"}[i%3]))
			}
			for range 3 { // commits interleaved
				for i, id := range branches {
					b.fill(id, 3+4*i)
				}
			}
			items := b.drainAll(new(Cursor), limit)
			for i, id := range branches {
				if got := lsns(items, id); !slices.Equal(got, upTo(1, int64(3*(3+4*i)))) {
					t.Errorf("branch %d: LSNs %v", id, got)
				}
			}
		})
	}
}

func TestDrainTakesTenantsAndBranchesInTurn(t *testing.T) {
	b := newBox(t)
	big, small1, small2, other := b.root("t1"), b.root("t1"), b.root("t1"), b.root("t2")
	b.fill(big, 1000)
	b.fill(small1, 3)
	b.fill(small2, 3)
	b.fill(other, 400)
	items := b.drain(new(Cursor), 400)
	for id, least := range map[int64]int{big: 100, small1: 3, small2: 3, other: 200} {
		if n := len(lsns(items, id)); n < least {
			t.Errorf("branch %d: %d of 400 records, want at least %d", id, n, least)
		}
	}
	// Also over several small batches.
	c, seen := new(Cursor), map[string]bool{}
	for range 2 {
		seen[b.drain(c, 1)[0].Key.Tenant] = true
	}
	if len(seen) != 2 {
		t.Errorf("two batches of one record are both of tenant %v", seen)
	}
	// A tenant that is asked for by name comes alone.
	items, err := b.Drain(t.Context(), "t2", new(Cursor), 1000)
	if err != nil || len(items) != 400 {
		t.Errorf("tenant t2: %d records, %v", len(items), err)
	}
	// What one tenant leaves, the others get, in the same call.
	if items := b.drain(new(Cursor), 1200); len(items) != 1200 {
		t.Errorf("%d of 1406 pending records with limit 1200", len(items))
	}
}

func TestDrainHandsOutNothingTwice(t *testing.T) {
	b := newBox(t)
	branch := b.root("t")
	b.fill(branch, 100)
	c := new(Cursor)
	fence := b.lease()
	first := b.drain(c, 30)
	second := b.drain(c, 30)
	if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(first[9])}); err != nil {
		t.Fatal(err)
	}
	c.Settle(branch, first[9].LSN) // more are on their way: the position stays
	third := b.drain(c, 10)
	last := third[len(third)-1]
	if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(last)}); err != nil {
		t.Fatal(err)
	}
	c.Settle(branch, last.LSN)
	rest := b.drainAll(c, 64)
	if got := lsns(slices.Concat(first, second, third, rest), branch); !slices.Equal(got, upTo(1, 100)) {
		t.Errorf("handed out %v, want 1 to 100 once each", got)
	}
	b.fill(branch, 1)
	if got := lsns(b.drainAll(c, 64), branch); !slices.Equal(got, []int64{101}) {
		t.Errorf("then %v, want 101", got)
	}
}

func TestReturnedRecordsComeAgain(t *testing.T) {
	b := newBox(t)
	one, two := b.root("t"), b.root("t")
	b.fill(one, 40)
	b.fill(two, 40)
	c := new(Cursor)
	items := b.drainAll(c, 25)
	if len(items) != 80 {
		t.Fatalf("%d items", len(items))
	}
	sent := items[:37]
	c.Return(items[37:])
	again := b.drainAll(c, 25)
	for _, id := range []int64{one, two} {
		if got := lsns(slices.Concat(sent, again), id); !slices.Equal(got, upTo(1, 40)) {
			t.Errorf("branch %d: %v, want 1 to 40 once each", id, got)
		}
	}
}

func TestDrainNeverDelaysANewBacklog(t *testing.T) {
	b := newBox(t)
	big := b.root("t")
	b.bulk(big, 100_000)
	for range 50 { // also branches whose backlog is old already
		b.fill(b.root("t"), 20)
	}
	for _, limit := range []int{1, 7, 1000} {
		c := new(Cursor)
		b.drain(c, limit)
		for i := range 5 {
			late := b.root("t")
			b.fill(late, 3)
			got := lsns(slices.Concat(b.drain(c, limit), b.drain(c, limit)), late)
			if len(got) == 0 || got[0] != 1 {
				t.Fatalf("limit %d: new branch %d did not come within the next two drains", limit, i)
			}
		}
		if n := len(lsns(slices.Concat(b.drain(c, 1000), b.drain(c, 1000)), big)); n == 0 {
			t.Errorf("limit %d: the big branch does not come any more", limit)
		}
	}
}

func TestNewBacklogsDoNotStarveOldOnes(t *testing.T) {
	for _, limit := range []int{1, 7, 100} {
		for _, bytes := range []int{10, 300_000} {
			t.Run(fmt.Sprintf("limit %d, %d bytes", limit, bytes), func(t *testing.T) {
				b := newBox(t)
				big := b.root("t")
				b.bulk(big, 2_000)
				c, fence := new(Cursor), b.lease()
				drains, got := 20, 0
				for range drains {
					fresh := b.root("t") // brings as much as one drain takes
					records := make([]record.Record, min(limit, 1_000_000/bytes))
					for i := range records {
						records[i] = event(string(make([]byte, bytes)))
					}
					b.add(fresh, records...)
					items := b.drain(c, limit)
					got += len(lsns(items, big))
					var marks []Shipped
					for _, it := range items {
						marks = append(marks, shippedUpTo(it))
					}
					if err := b.Ack(t.Context(), fence, marks); err != nil {
						t.Fatal(err)
					}
				}
				if got < drains*limit/8 {
					t.Errorf("the old backlog got %d of %d records", got, drains*limit)
				}
			})
		}
	}
}

func TestDrainBringsAParentsKeptPrefixBeforeItsChild(t *testing.T) {
	for _, limit := range []int{1, 7, 1000} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			b := newBox(t)
			b.fill(b.root("t"), 50) // takes turns in between
			root := b.root("t")
			b.fill(root, 100)
			c := new(Cursor)
			fence := b.lease()
			var items []Item
			more := func() []Item { got := b.drain(c, limit); items = append(items, got...); return got }
			more()
			child := b.rewind(root, 70)
			b.fill(child, 20)
			grandchild := b.rewind(child, 80)
			b.fill(grandchild, 5)
			acked := 0
			for got := more(); len(got) > 0; got = more() {
				// The parent is acknowledged meanwhile, in part and with delay.
				if mine := lsns(items, root); len(mine)/2 > acked {
					acked = len(mine) / 2
					i := slices.IndexFunc(items, func(it Item) bool { return it.Branch == root && it.LSN == int64(acked) })
					if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(items[i])}); err != nil {
						t.Fatal(err)
					}
					c.Settle(root, int64(acked))
				}
			}
			var order []int64
			for _, it := range items {
				if slices.Contains([]int64{root, child, grandchild}, it.Branch) && (len(order) == 0 || order[len(order)-1] != it.Branch) {
					order = append(order, it.Branch)
				}
			}
			if !slices.Equal(order, []int64{root, child, grandchild}) {
				t.Errorf("branches came in order %v, want %v", order, []int64{root, child, grandchild})
			}
			before := max(70, int64(len(lsns(items[:min(limit, len(items))], root)))) // a first drain may have passed the fork
			if got := lsns(items, root); !slices.Equal(got, upTo(1, before)) {
				t.Errorf("root: %d records up to %d, want up to %d", len(got), got[len(got)-1], before)
			}
			if got := lsns(items, child); !slices.Equal(got, upTo(71, 80)) {
				t.Errorf("child: %v", got)
			}
			if got := lsns(items, grandchild); !slices.Equal(got, upTo(81, 86)) {
				t.Errorf("grandchild: %v", got)
			}
		})
	}
}

func TestChildWaitsForWhatWasReturnedOfItsParent(t *testing.T) {
	b := newBox(t)
	root := b.root("t")
	b.fill(root, 20)
	c := new(Cursor)
	items := b.drain(c, 20)
	child := b.rewind(root, 10)
	c.Return(items[5:]) // a relay that sees the rewind before record 6
	got := b.drainAll(c, 100)
	if !slices.Equal(lsns(got[:5], root), upTo(6, 10)) || got[5].Branch != child {
		t.Errorf("after the rewind: root %v, child %v; want root 6 to 10 first", lsns(got, root), lsns(got, child))
	}
}

func TestAbandonedSuffixIsNeverDrained(t *testing.T) {
	b := newBox(t)
	root := b.root("t")
	b.fill(root, 40)
	child := b.rewind(root, 20)
	b.fill(child, 20)
	b.rewind(root, 10, child) // the child goes whole
	items := b.drainAll(new(Cursor), 7)
	if got := lsns(items, root); !slices.Equal(got, upTo(1, 10)) {
		t.Errorf("root: %v", got)
	}
	if got := lsns(items, child); len(got) != 0 {
		t.Errorf("abandoned child: %v", got)
	}
	if len(items) != 11 {
		t.Errorf("%d items, want the 10 kept and one branch.opened", len(items))
	}
}

func TestDrainIsBoundedInBytes(t *testing.T) {
	b := newBox(t)
	var branches []int64
	for i := range 4 {
		id := b.root(fmt.Sprint("t", i%2))
		branches = append(branches, id)
		for range 10 {
			b.add(id, record.Record{Kind: record.Message, Topic: "x", Data: bytes.Repeat([]byte{1}, 256<<10), Occurred: 1})
		}
	}
	c := new(Cursor)
	var items []Item
	for {
		got := b.drain(c, 1000)
		if len(got) == 0 {
			break
		}
		if n := sizeOf(got); n > drainBytes+3*(256<<10) {
			t.Errorf("one drain holds %d bytes", n)
		}
		items = append(items, got...)
	}
	for _, id := range branches {
		if got := lsns(items, id); !slices.Equal(got, upTo(1, 10)) {
			t.Errorf("branch %d: %v", id, got)
		}
	}
	// A record larger than the whole budget comes all the same.
	big := b.root("t9")
	b.add(big, message("before"), record.Record{Kind: record.Message, Topic: "x", Data: make([]byte, 2*drainBytes), Occurred: 1}, message("after"))
	if got := lsns(b.drainAll(c, 10), big); !slices.Equal(got, upTo(1, 3)) {
		t.Errorf("large record: %v", got)
	}
}

func TestHeldBranchWaitsAndNothingOvertakesIt(t *testing.T) {
	b := newBox(t)
	held, other := b.root("t"), b.root("t")
	b.fill(held, 20)
	b.fill(other, 20)
	b.rewind(held, 10)
	b.exec("UPDATE branch SET hold_us = ? WHERE id = ?", time.Now().Add(time.Hour).UnixMicro(), held)
	c := new(Cursor)
	if got := b.drainAll(c, 100); !slices.Equal(lsns(got, other), upTo(1, 20)) || len(got) != 20 {
		t.Errorf("beside a held branch: %d items, want the other's 20 only", len(got))
	}
	b.exec("UPDATE branch SET hold_us = ? WHERE id = ?", time.Now().Add(-time.Second).UnixMicro(), held)
	if got := b.drainAll(c, 100); len(got) != 11 || got[0].Branch != held {
		t.Errorf("after the hold: %d items", len(got))
	}
}

// An error, too, hands out nothing that the caller did not get.
func TestDrainReportsAHoleInABranch(t *testing.T) {
	b := newBox(t)
	good, holed := b.root("t"), b.root("u")
	b.fill(good, 10)
	b.fill(holed, 10)
	b.exec("UPDATE outbox SET lsn = 500 WHERE branch = ? AND lsn = 5", holed)
	c := new(Cursor)
	if items, err := b.Drain(context.Background(), "", c, 100); err == nil {
		t.Errorf("drained %v over a missing record", lsns(items, holed))
	}
	b.exec("UPDATE outbox SET lsn = 5 WHERE lsn = 500")
	items := b.drainAll(c, 100)
	for _, id := range []int64{good, holed} {
		if got := lsns(items, id); !slices.Equal(got, upTo(1, 10)) {
			t.Errorf("branch %d after an error: %v, want all", id, got)
		}
	}
}
