package outbox

import (
	"context"
	"slices"
	"testing"

	"postrider/internal/record"
)

func TestReshipStartsAtTheFirstEventThatDidNotArrive(t *testing.T) {
	b := newBox(t)
	whole, tail, messages, nothing, never := b.root("t1"), b.root("t1"), b.root("t2"), b.root("t2"), b.root("t2")
	for _, branch := range []int64{whole, tail, nothing, never} {
		for range 20 {
			b.add(branch, event("1"), message("plant/1"))
		}
	}
	b.add(messages, event("1"), message("plant/1"), message("plant/2"))
	var c Cursor
	fence := b.lease()
	for _, it := range b.drainAll(&c, 100) {
		if it.Branch != never {
			if err := b.Ack(t.Context(), fence, []Shipped{shippedUpTo(it)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	before, err := b.Stats(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	// Held are LSNs of events, which are odd here: 39 is the last one of twenty.
	arrived := map[int64]int64{whole: 39, tail: 25, messages: 1, nothing: 0, never: 0}
	names := map[string]int64{}
	for branch := range arrived {
		var ulid string
		if err := b.store.Reader().QueryRow("SELECT ulid FROM branch WHERE id = ?", branch).Scan(&ulid); err != nil {
			t.Fatal(err)
		}
		names[ulid] = branch
	}
	n, err := b.Reship(t.Context(), func(_ context.Context, key record.BranchKey) (int64, error) { return arrived[names[key.Branch]], nil })
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(40 - 26 + 40); n != want {
		t.Errorf("%d records are pending again, not %d", n, want)
	}
	after, err := b.Stats(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if after.Pending != before.Pending+n || after.Shipped != before.Shipped-n || after.PendingBytes <= before.PendingBytes {
		t.Errorf("before %+v, after %+v", before, after)
	}
	items := b.drainAll(&Cursor{}, 100)
	for branch, want := range map[int64][]int64{whole: nil, tail: upTo(27, 40), messages: nil, nothing: upTo(1, 40), never: upTo(1, 40)} {
		if got := lsns(items, branch); !slices.Equal(got, want) {
			t.Errorf("branch %d: drained %v, want %v", branch, got, want)
		}
	}
}
