package sqlite

import (
	"context"
	"sync/atomic"
	"testing"
	"time"
)

// machine has clocks that tests set.
type machine struct {
	wall, up atomic.Int64 // microseconds
	boot     string
}

const (
	second = int64(1_000_000)
	hour   = 3600 * second
	day    = 24 * hour
	year   = 365 * day
	noon   = 1_770_000_000 * second // in 2026
)

func newMachine() *machine {
	m := &machine{boot: "first"}
	m.wall.Store(noon)
	m.up.Store(5 * hour)
	return m
}

func (m *machine) clocks() Clocks {
	return Clocks{Boot: m.boot, Wall: func() time.Time { return time.UnixMicro(m.wall.Load()) },
		Uptime: func() time.Duration { return time.Duration(m.up.Load()) * time.Microsecond }}
}

func (m *machine) pass(us int64) { m.wall.Add(us); m.up.Add(us) }

// reboot has the machine start again, with that on its wall clock.
func (m *machine) reboot(boot string, wall int64) {
	m.boot = boot
	m.up.Store(20 * second)
	m.wall.Store(wall)
}

// moment is the times of a transaction, and of the store beside it.
type moment struct{ recorded, steady, wall, skip int64 }

func times(t *testing.T, s *Store) (m moment) {
	t.Helper()
	err := s.Write(t.Context(), func(ctx context.Context, tx *Tx) error {
		m = moment{recorded: tx.NowUS, steady: tx.SteadyUS, wall: tx.WallUS}
		return tx.Get(ctx, "SELECT skip_us FROM meta", nil, &m.skip)
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.NowUS() != m.recorded || s.SteadyUS() != m.steady {
		t.Errorf("the store says %d and %d, its transaction %d and %d", s.NowUS(), s.SteadyUS(), m.recorded, m.steady)
	}
	return m
}

// Whatever is done to the wall clock, steady time goes on at the machine's pace, for every process of a boot, and between
// boots by what the wall clock saw pass, if it did.
func TestSteadyTimeIsNotTheWallClocks(t *testing.T) {
	m, path := newMachine(), newPath(t)
	s := open(t, path, Options{Create: true, Clocks: m.clocks()})
	steady, recorded := noon, noon
	check := func(what string) {
		t.Helper()
		got := times(t, s)
		if got.steady != steady || got.recorded != recorded || got.wall != m.wall.Load() {
			t.Errorf("%s: steady %+d, recorded %+d, wall %+d from what it should be", what, got.steady-steady, got.recorded-recorded, got.wall-m.wall.Load())
		}
		reader, err := Open(t.Context(), path, rowsSchema, Options{ReadOnly: true, Clocks: m.clocks()})
		if err != nil {
			t.Fatal(err)
		}
		if reader.SteadyUS() != steady || reader.NowUS() != recorded || reader.FoundUS() != steady {
			t.Errorf("%s: a reader says steady %+d, recorded %+d, found %+d from what it should be", what, reader.SteadyUS()-steady, reader.NowUS()-recorded, reader.FoundUS()-steady)
		}
		m.pass(second)
		steady, recorded = steady+second, recorded+second
		for _, s := range []*Store{s, reader} {
			if s.SteadyUS() != steady || s.NowUS() != recorded {
				t.Errorf("%s: a second later steady %+d, recorded %+d from what it should be", what, s.SteadyUS()-steady, s.NowUS()-recorded)
			}
			if got, want := s.Wall(steady+hour), m.wall.Load()+hour; got-want > 1000 || want-got > 1000 {
				t.Errorf("%s: in an hour it is %+d from what it should be", what, got-want)
			}
		}
		if err := reader.Close(); err != nil {
			t.Error(err)
		}
	}
	reopen := func() {
		t.Helper()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		found := s.SteadyUS()
		last := number(t, open(t, path, Options{ReadOnly: true, Clocks: m.clocks()}), "SELECT steady_us FROM meta")
		s = open(t, path, Options{Clocks: m.clocks()})
		if s.FoundUS() != last || last > found {
			t.Errorf("the last transaction was at %d, found was %d", last, s.FoundUS())
		}
	}
	check("new")
	m.wall.Add(-hour)
	check("set back an hour")
	reopen()
	check("set back an hour, another process")
	m.pass(10 * second)
	steady, recorded = steady+10*second, recorded+10*second
	reopen()
	check("ten seconds without a process")

	m.wall.Add(30 * year)
	recorded = m.wall.Load()
	check("set ahead by years")
	reopen()
	check("set ahead by years, another process")
	m.wall.Store(noon + hour)
	check("set back again")
	reopen()
	check("set back again, another process")

	m.reboot("second", m.wall.Load()+2*hour)
	steady, recorded = steady+2*hour, m.wall.Load()
	reopen()
	check("another boot, off for two hours, with the right clock")

	m.reboot("third", 100*second)
	recorded = m.wall.Load()
	steady -= second // nobody knows of what passed after the last transaction
	reopen()
	check("another boot in 1970")
	m.wall.Store(noon + day)
	recorded = m.wall.Load()
	check("the right time, in the boot that began in 1970")

	m.reboot("fourth", 100*second)
	recorded = m.wall.Load()
	steady -= second
	reopen()
	check("1970 again")
	m.reboot("fifth", noon+2*day)
	recorded = m.wall.Load()
	steady -= second
	reopen()
	check("the clock knows the time again, but not how long the machine was off")

	m.up.Store(5 * second)
	steady -= second
	check("less uptime within one boot")
}

// What windows count is the time that a process saw pass, and a day of each time that none did.
func TestSkippedTime(t *testing.T) {
	m, path := newMachine(), newPath(t)
	skip := int64(0)
	for _, c := range []struct {
		what        string
		pass, skips int64
		boot        string
	}{
		{"an hour", hour, 0, ""}, {"a day", day, 0, ""}, {"a week", 7 * day, 6 * day, ""},
		{"a week off", 7 * day, 6 * day, "second"}, {"an hour off", hour, 0, "third"},
	} {
		if c.boot == "" {
			m.pass(c.pass)
		} else {
			m.reboot(c.boot, m.wall.Load()+c.pass)
		}
		s := open(t, path, Options{Create: true, Clocks: m.clocks()})
		if c.what == "an hour" {
			m.pass(c.pass)
		}
		skip += c.skips
		if got := times(t, s).skip; got != skip {
			t.Errorf("%s: %d s are skipped, want %d", c.what, got/second, skip/second)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A process that stands still between its looks at the two clocks takes none of them for the other's.
func TestClocksAreReadAsOfOneMoment(t *testing.T) {
	m := newMachine()
	c := m.clocks()
	stops := 3
	c.Wall = func() time.Time {
		now := time.UnixMicro(m.wall.Load())
		if stops--; stops >= 0 {
			m.pass(hour)
		}
		return now
	}
	if wall, up := c.read(); wall != m.wall.Load() || up != m.up.Load() {
		t.Errorf("read %d and %d, it is %d and %d", wall, up, m.wall.Load(), m.up.Load())
	}
}

// What is told again and again does not change by the microseconds between two looks at the clocks, and follows the wall
// clock when that is set.
func TestWallDoesNotTremble(t *testing.T) {
	m := newMachine()
	s := open(t, newPath(t), Options{Create: true, Clocks: m.clocks()})
	due := s.SteadyUS() + hour
	want := s.Wall(due)
	if d := want - (noon + hour); d < -1000 || d > 1000 {
		t.Errorf("an hour from now is %d from what it should be", d)
	}
	for _, d := range []int64{700, -1400, 5000, -5000} {
		m.wall.Add(d)
		if got := s.Wall(due); got != want {
			t.Errorf("%d became %d", want, got)
		}
	}
	m.wall.Add(-hour)
	if got := s.Wall(due); got > want-hour+10_000 || got < want-hour-10_000 {
		t.Errorf("after the clock was set back by an hour: %d, was %d", got, want)
	}
}

// The machine's own clocks: steady time goes on between transactions, and two processes agree on it.
func TestSteadyTimeOfTheMachine(t *testing.T) {
	path := newPath(t)
	s := open(t, path, Options{Create: true})
	if bootID() == "" || uptime() <= 0 {
		t.Errorf("boot %q, up for %v", bootID(), uptime())
	}
	before := s.SteadyUS()
	eventually(t, "steady time goes on", func() bool { return s.SteadyUS() > before+2000 })
	var inside int64
	if err := s.Write(t.Context(), func(_ context.Context, tx *Tx) error { inside = tx.SteadyUS; return nil }); err != nil {
		t.Fatal(err)
	}
	for _, o := range []Options{{}, {ReadOnly: true}} {
		other := open(t, path, o)
		if a, b, c := s.SteadyUS(), other.SteadyUS(), s.SteadyUS(); b < a || b > c || a < inside {
			t.Errorf("%+v: %d is not between %d and %d, after %d", o, b, a, c, inside)
		}
	}
	if d := s.Wall(s.SteadyUS()) - time.Now().UnixMicro(); d < -second || d > second {
		t.Errorf("now is %d µs from the wall clock", d)
	}
}

// Without a boot to go by, the wall clock says what passed between processes.
func TestUnknownBootGoesByTheWallClock(t *testing.T) {
	m, path := newMachine(), newPath(t)
	m.boot = "no boot"
	s := open(t, path, Options{Create: true, Clocks: m.clocks()})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	m.wall.Add(hour)
	m.up.Add(-hour)
	m.boot = "no boot either"
	if s = open(t, path, Options{Clocks: m.clocks()}); s.SteadyUS() != noon+hour {
		t.Errorf("steady time is %d, want %d", s.SteadyUS(), noon+hour)
	}
	if a, b := (Clocks{}).filled(), (Clocks{}).filled(); a.Boot != b.Boot || a.Boot == "" {
		t.Errorf("one boot is called %q and %q", a.Boot, b.Boot)
	}
}
