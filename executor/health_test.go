package executor

import (
	"testing"
	"testing/synctest"
	"time"
)

// An idle executor goes on looking; one that cannot read its database does not count as going on.
func TestHealthIsASuccessfulLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, nil, Options{})
		if n.Health() == nil {
			t.Error("it did not start yet")
		}
		stop := n.start(t)
		<-time.After(5 * time.Minute) // of the bubble
		if err := n.Health(); err != nil {
			t.Errorf("idle: %v", err)
		}
		if err := n.store.Reader().Close(); err != nil {
			t.Fatal(err)
		}
		<-time.After(stuckAfter - time.Second) // of the bubble
		if err := n.Health(); err != nil {
			t.Errorf("a moment without its database: %v", err)
		}
		<-time.After(2 * time.Second) // of the bubble
		if err := n.Health(); err == nil {
			t.Error("it cannot read its database")
		}
		stop()
	})
}
