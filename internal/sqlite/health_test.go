package sqlite

import (
	"context"
	"errors"
	"math"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A commit that does not come to its end is seen as such after a while, and no longer once it ended.
func TestHealthNoticesACommitThatHangs(t *testing.T) {
	var ahead atomic.Int64
	start := time.Now() // and the clock stands still
	s := open(t, newPath(t), Options{Create: true, Clocks: Clocks{Wall: func() time.Time { return start.Add(time.Duration(ahead.Load())) }}})
	healthy := func() error { t.Helper(); return s.Health(t.Context()) }
	if err := healthy(); err != nil {
		t.Fatal(err)
	}
	taken, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	end := func() { once.Do(func() { close(release) }) }
	defer end()
	done := make(chan error, 1)
	go func() {
		done <- s.Write(t.Context(), func(context.Context, *Tx) error { close(taken); <-release; return nil })
	}()
	<-taken
	if err := healthy(); err != nil {
		t.Errorf("a commit that has just begun: %v", err)
	}
	ahead.Store(int64(stuckAfter + time.Second))
	if err := healthy(); err == nil || !strings.Contains(err.Error(), "has been under way for 11s") {
		t.Errorf("a commit that hangs: %v", err)
	}
	end()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	ahead.Add(int64(time.Hour)) // nothing is under way any more, as soon as the writer has let go
	healthyAgain(t, s)
}

// healthyAgain waits until the writer has let go of its last group: it answers a little earlier.
func healthyAgain(t *testing.T, s *Store) {
	t.Helper()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(30 * time.Second); ; <-again.C {
		err := s.Health(t.Context())
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestHealthNoticesThatTheFileIsGone(t *testing.T) {
	path := newPath(t)
	s := open(t, path, Options{Create: true})
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	if err := s.Health(t.Context()); !errors.Is(err, ErrGone) {
		t.Errorf("%v, not ErrGone", err)
	}
}

func TestHealthOfAReaderIsThatItReads(t *testing.T) {
	path := newPath(t)
	if err := open(t, path, Options{Create: true}).Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := open(t, path, Options{ReadOnly: true})
	if err := s.Health(t.Context()); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Health(ctx); err == nil {
		t.Error("a read that could not be made")
	}
}

// A full disk is the store's fault and lasts until something is committed again; what a unit does wrong is its own.
func TestHealthNoticesThatNothingCanBeCommitted(t *testing.T) {
	var ahead atomic.Int64
	start := time.Now() // and the clock stands still
	s := open(t, newPath(t), Options{Create: true, Clocks: Clocks{Wall: func() time.Time { return start.Add(time.Duration(ahead.Load())) }}})
	if err := s.Write(t.Context(), func(context.Context, *Tx) error { return errOwn }); !errors.Is(err, errOwn) {
		t.Fatal(err)
	}
	if err := s.Health(t.Context()); err != nil {
		t.Errorf("a unit that refused: %v", err)
	}
	limit(t, s, 0)
	full := func() { // fails whatever room the pages have left
		t.Helper()
		if err := s.Write(t.Context(), blob(1, 100_000)); !isFull(err) {
			t.Fatal(err)
		}
	}
	full()
	if err := s.Health(t.Context()); !isFull(err) || !strings.HasPrefix(err.Error(), "the last commit to test.db failed: ") {
		t.Errorf("a full disk: %v", err)
	}
	ahead.Add(int64(failedFor))
	healthyAgain(t, s) // nobody has tried for a minute
	full()
	errs := group(t, s, blob(2, 100_000), blob(3, 100_000))
	if !isFull(errs[0]) || !isFull(errs[1]) {
		t.Fatal(errs)
	}
	if err := s.Health(t.Context()); !isFull(err) {
		t.Errorf("a group on a full disk: %v", err)
	}
	if err := s.Write(t.Context(), insert(4)); err != nil {
		t.Fatal(err)
	}
	healthyAgain(t, s) // there is room
}

func TestRoomThatIsLeft(t *testing.T) {
	disk := unix.Statfs_t{Bsize: 4096, Blocks: 100, Bfree: 10, Bavail: 5}
	for _, c := range []struct {
		disk      unix.Statfs_t
		superuser bool
		want      float64
	}{
		{disk, false, 5 * 4096}, {disk, true, 10 * 4096}, {unix.Statfs_t{Bsize: 4096}, false, math.Inf(1)}, {unix.Statfs_t{Bsize: 4096, Blocks: 100}, false, 0},
	} {
		if got := left(&c.disk, c.superuser); got != c.want {
			t.Errorf("%+v: %v, not %v", c, got, c.want)
		}
	}
}
