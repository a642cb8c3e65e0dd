package outbox

import (
	"slices"
	"testing"
)

// What the broker's session may have is on record before it is told, and until it is told otherwise.
func TestSubscriptionsAreOnRecord(t *testing.T) {
	b, ctx := newBox(t), t.Context()
	granted := false
	subscribing := func(want []string, filters ...string) {
		t.Helper()
		dropped, had, err := b.Subscribing(ctx, "b:1883", filters)
		if err != nil || !slices.Equal(dropped, want) || had != granted {
			t.Errorf("subscribing to %v drops %v, granted %v, %v; want %v, %v", filters, dropped, had, err, want, granted)
		}
	}
	subscribing(nil, "a", "b/#", "c")
	subscribing([]string{"a", "b/#"}, "c", "d")
	subscribing([]string{"a", "b/#"}, "c", "d") // the process ended before it could unsubscribe
	if err := b.Unsubscribed(ctx, "b:1883", []string{"a", "none"}); err != nil {
		t.Fatal(err)
	}
	subscribing([]string{"b/#", "c", "d"}, "a")
	subscribing(nil, "a", "b/#", "c", "d")
	if err := b.Subscribed(ctx, "b:1883", []string{"a", "c"}); err != nil {
		t.Fatal(err)
	}
	subscribing([]string{"a", "c", "d"}, "b/#")
	granted = true
	subscribing([]string{"b/#", "d"}, "a", "c")
	// A connection to another broker says nothing about this one's session; one to this broker, all of it may be gone.
	if err := b.Connecting(ctx, "other:1883"); err != nil {
		t.Fatal(err)
	}
	subscribing([]string{"b/#", "d"}, "a", "c")
	if err := b.Connecting(ctx, "b:1883"); err != nil {
		t.Fatal(err)
	}
	granted = false
	subscribing([]string{"b/#", "d"}, "a", "c")
	if dropped, had, err := b.Subscribing(ctx, "other:1883", []string{"a"}); len(dropped) > 0 || had || err != nil {
		t.Errorf("another broker drops %v, granted %v, %v", dropped, had, err)
	}
}
