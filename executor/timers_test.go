package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

// watch is a machine in a bubble: its uptime is the bubble's, its wall clock is set by the test.
type watch struct {
	ahead  atomic.Int64 // of the wall clock, from the bubble's
	booted time.Time
	boot   string
}

var today = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func newWatch(wall time.Time) *watch {
	w := &watch{booted: time.Now().Add(-time.Hour), boot: "boot 1"}
	w.set(wall)
	return w
}

func (w *watch) set(wall time.Time) { w.ahead.Store(int64(time.Until(wall))) }

func (w *watch) now() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) }

func (w *watch) clocks() sqlite.Clocks {
	return sqlite.Clocks{Wall: w.now, Uptime: func() time.Duration { return time.Since(w.booted) }, Boot: w.boot}
}

// reboot has the machine start again; it was off for as long as the wall clock says.
func (w *watch) reboot() {
	w.booted, w.boot = time.Now(), w.boot+"+"
}

// diary is when steps were taken, by the type of their input.
type diary struct {
	mu    sync.Mutex
	start time.Time
	lines []string
}

func (d *diary) note(typ string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, fmt.Sprintf("%s %v", typ, time.Since(d.start).Truncate(time.Minute)))
}

func (d *diary) mustSay(t *testing.T, want ...string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	got := slices.Sorted(slices.Values(d.lines))
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("steps were taken at\n%q\nwant\n%q", got, want)
	}
}

// pass lets time pass in a bubble.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// newTimed opens a node on the machine; its database is made outside the bubble, in dir.
func newTimed(t *testing.T, w *watch, dir string, agents map[string]agent.Agent, o Options) *node {
	t.Helper()
	n := &node{t: t, path: filepath.Join(dir, "node.db"), clocks: w.clocks()}
	n.open(t, agents, o)
	t.Cleanup(func() {
		if err := n.store.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// Whatever is done to the wall clock, and whatever starts again meanwhile: timers by a duration, pauses and expiry keep to
// their time, timers by the wall clock to its, and the step in hand goes on.
func TestClockThatIsSetFiresAndSilencesNothing(t *testing.T) {
	const back = "at 2h0m0s"
	for _, c := range []struct {
		name  string
		wall  time.Time // at start
		set   func(w *watch)
		again func(w *watch) // a quarter of an hour later
		at    string         // when the timer for today in an hour comes
	}{
		{name: "untouched", wall: today, at: "at 1h0m0s"},
		{name: "1970, then now", wall: time.Unix(100, 0), set: func(w *watch) { w.set(today.Add(10 * time.Minute)) }, at: "at 1h0m0s"},
		{name: "an hour back", wall: today, set: func(w *watch) { w.set(w.now().Add(-time.Hour)) }, at: back},
		{name: "years ahead", wall: today, set: func(w *watch) { w.set(w.now().AddDate(30, 0, 0)) }, at: "at 10m0s"},
		{name: "years ahead and back", wall: today, set: func(w *watch) { w.set(w.now().AddDate(30, 0, 0)) },
			again: func(w *watch) { w.set(w.now().AddDate(-30, 0, 0)) }, at: "at 10m0s"},
		{name: "years back and ahead", wall: today, set: func(w *watch) { w.set(w.now().AddDate(-30, 0, 0)) },
			again: func(w *watch) { w.set(w.now().AddDate(30, 0, 0)) }, at: "at 1h0m0s"},
	} {
		for _, mode := range []string{"running", "restarted later", "machine restarted later", "set while stopped", "set while off"} {
			if mode == "set while off" && strings.HasPrefix(c.name, "years ahead") {
				continue // nobody can tell that from a machine that was off for years
			}
			t.Run(c.name+", "+mode, func(t *testing.T) {
				dir := t.TempDir()
				synctest.Test(t, func(t *testing.T) { clockIsSet(t, dir, mode, c.wall, c.set, c.again, c.at) })
			})
		}
	}
}

func clockIsSet(t *testing.T, dir, mode string, wall time.Time, set, again func(w *watch), at string) {
	w, d := newWatch(wall), &diary{start: time.Now()}
	var busy, busyAgain atomic.Bool
	agents := map[string]agent.Agent{"a": agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
		switch s.Input.Type {
		case "busy":
			if !busy.Swap(true) {
				return agent.Effects{}, &agent.Error{Code: agent.Busy, RetryAfter: 30 * time.Minute}
			}
		case "busy again":
			if !busyAgain.Swap(true) {
				return agent.Effects{}, &agent.Error{Code: agent.Busy, RetryAfter: 30 * time.Minute}
			}
		case "long":
			select {
			case <-time.After(20 * time.Minute):
			case <-ctx.Done():
				return agent.Effects{}, context.Cause(ctx)
			}
		}
		if s.Input.Type != "t" {
			d.note(s.Input.Type)
		}
		return scripted(ctx, s)
	})}
	o := Options{Poll: 5 * time.Minute, StepDeadline: 25 * time.Minute}
	n := newTimed(t, w, dir, agents, o)
	for run, data := range map[string]string{
		"in":      `{"commands": [{"type": "in", "in": "1h", "data": {}}]}`,
		"at":      `{"commands": [{"type": "at", "at": "` + today.Add(time.Hour).Format(time.RFC3339) + `", "data": {}}]}`,
		"expires": `{"commands": [{"type": "kept", "in": "90m", "expires_in": "100m", "data": {}}, {"type": "late", "in": "90m", "expires_in": "80m", "data": {}}]}`,
		"record":  `{"messages": [{"topic": "lamp/set", "data": 1, "expires_in": "150m"}]}`,
	} {
		n.send("a", run, "1", data)
	}
	for _, typ := range []string{"busy", "long"} {
		if typ == "long" && mode != "running" {
			continue
		}
		if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: typ, Type: typ, Data: []byte("{}"), Source: "cli"}); err != nil {
			t.Fatal(err)
		}
	}
	stop := n.start(t)
	start := func() { n.clocks = w.clocks(); n.restart(t, agents, o); stop = n.start(t) }
	change := func(f func(w *watch)) {
		switch {
		case mode == "running" || f == nil:
			if f != nil {
				f(w)
				n.Wake() // which is every 200 ms, for a node that does not have two hours to pass
			}
		case strings.HasPrefix(mode, "set while"):
			stop()
			f(w)
			if mode == "set while off" {
				w.reboot()
			}
			start()
		default:
			f(w)
			n.Wake()
			pass(time.Minute)
			stop()
			if mode == "machine restarted later" {
				w.reboot()
			}
			start()
		}
	}
	pass(10 * time.Minute)
	d.mustSay(t)
	change(set)
	pass(time.Until(d.start.Add(25 * time.Minute)))
	change(again)
	pass(time.Until(d.start.Add(27 * time.Minute)))
	for typ, in := range map[string]time.Duration{"busy again": 0, "after": 50 * time.Minute} {
		if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: strings.ReplaceAll(typ, " ", "-"), Type: typ, Data: []byte("{}"), Source: "cli", In: in}); err != nil {
			t.Fatal(err)
		}
	}
	n.Wake()
	pass(time.Until(d.start.Add(100*time.Minute + 30*time.Second)))
	want := []string{"busy 30m0s", "in 1h0m0s", "kept 1h30m0s", "busy again 57m0s", "after 1h17m0s"}
	if mode == "running" {
		want = append(want, "long 20m0s")
	}
	if at != "at 2h0m0s" {
		want = append(want, at)
	}
	d.mustSay(t, want...)
	pass(30 * time.Minute)
	if at == "at 2h0m0s" {
		want = append(want, at)
	}
	d.mustSay(t, want...)
	if got := n.value("SELECT group_concat(type || ': ' || reason) FROM inbox WHERE outcome = 'dead'"); got != "late: expired before its step" {
		t.Errorf("dead letters: %q", got)
	}
	if got := n.value("SELECT expires_us - ? FROM outbox WHERE topic = 'lamp/set'", n.store.SteadyUS()); !strings.HasPrefix(got, "11") || len(got) != len("1180000000") {
		t.Errorf("the order to the lamp expires in %s µs, want 20 minutes less half of one", got)
	}
	if mode == "running" || mode == "restarted later" {
		if got := n.value("SELECT count(*) FROM checkpoint a JOIN checkpoint b ON b.id = a.id + 1 WHERE b.committed_us < a.committed_us"); got != "0" {
			t.Errorf("recorded time went back %s times within one boot", got)
		}
	}
}

// The time that the machine was off counts for timers, and past due is due now.
func TestTimersSurviveRestart(t *testing.T) {
	for _, off := range []time.Duration{0, 30 * time.Minute, 5 * time.Hour, 400 * 24 * time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				w, d := newWatch(today), &diary{start: time.Now()}
				agents := one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
					d.note(s.Input.Type)
					return agent.Effects{}, nil
				})
				o := Options{Poll: 10 * time.Second}
				n := newTimed(t, w, dir, agents, o)
				submit := func(run, typ string, in time.Duration, at time.Time) {
					t.Helper()
					input := Input{Tenant: "d", Agent: "a", Run: run, Type: typ, Data: []byte("{}"), Source: "cli", In: in}
					if !at.IsZero() {
						input.AtUS = at.UnixMicro()
					}
					if _, err := Submit(t.Context(), n.store, input); err != nil {
						t.Fatal(err)
					}
				}
				submit("r1", "in", time.Hour, time.Time{})
				submit("r2", "at", 0, today.Add(time.Hour))
				submit("r3", "past", 0, today.Add(-time.Hour))
				submit("r4", "very past", 0, time.Unix(1, 0))
				stop := n.start(t)
				pass(time.Minute)
				stop()
				w.set(w.now().Add(off))
				w.reboot()
				n.clocks = w.clocks()
				n.restart(t, agents, o)
				n.start(t)
				pass(time.Minute)
				comes := max(time.Hour-off, time.Minute).String()
				want := []string{"past 0s", "very past 0s"}
				if off >= time.Hour {
					want = append(want, "in 1m0s", "at 1m0s")
				}
				d.mustSay(t, want...)
				if off < time.Hour {
					pass(time.Hour - off)
					want = append(want, "in "+comes, "at "+comes)
				}
				d.mustSay(t, want...)
			})
		})
	}
}

// A timer by the wall clock whose time passed while no process lived is not due if the wall clock has been set back
// meanwhile.
func TestTimerIsNotDueAtStartWhenTheClockWasSetBack(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w, d := newWatch(today), &diary{start: time.Now()}
		agents := one(func(_ context.Context, s agent.Step) (agent.Effects, error) {
			d.note(s.Input.Type)
			return agent.Effects{}, nil
		})
		o := Options{Poll: 10 * time.Second}
		n := newTimed(t, w, dir, agents, o)
		if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", Type: "at", Data: []byte("{}"), Source: "cli", AtUS: today.Add(time.Hour).UnixMicro()}); err != nil {
			t.Fatal(err)
		}
		stop := n.start(t)
		pass(time.Minute)
		stop()
		pass(2 * time.Hour)
		w.set(today.Add(30 * time.Minute))
		n.restart(t, agents, o)
		n.start(t)
		pass(29 * time.Minute)
		d.mustSay(t)
		pass(2 * time.Minute)
		d.mustSay(t, "at 2h31m0s")
	})
}

// Many timers are set in several transactions. What is in hand, or waits for its next attempt, stays as it is.
func TestTimersFollowTheClockInBatches(t *testing.T) {
	n := newNode(t, map[string]agent.Agent{"a": agent.Func(scripted), "broken": agent.Func(func(context.Context, agent.Step) (agent.Effects, error) {
		return agent.Effects{}, &agent.Error{Code: agent.Busy, RetryAfter: time.Hour}
	})}, Options{})
	var ahead atomic.Int64
	n.clocks.Wall = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	n.restart(t, map[string]agent.Agent{"a": agent.Func(scripted), "broken": n.agents["broken"]}, Options{})
	at := func(agentName, run string, due time.Time) {
		t.Helper()
		if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: agentName, Run: run, Type: "t", Data: []byte("{}"), Source: "cli", AtUS: due.UnixMicro()}); err != nil {
			t.Fatal(err)
		}
	}
	hour := time.Now().Truncate(time.Millisecond).Add(time.Hour)
	const many = 2*retimeBatch + 7
	for i := range many {
		at("a", fmt.Sprintf("r%d", i%20), hour.Add(time.Duration(i%3)*time.Second))
	}
	at("broken", "paused", time.Now().Add(-time.Minute)) // due, and fails
	at("broken", "paused", hour)
	n.settle()
	const inHand = "SELECT wake_us || ' ' || due_us FROM run r JOIN inbox i ON i.id = r.claim_input WHERE r.name = 'paused'"
	pausedBefore := n.value(inHand)
	if pausedBefore == "" {
		t.Fatal("no run waits for its next attempt")
	}
	if err := n.watchClocks(t.Context()); err != nil { // as at start
		t.Fatal(err)
	}
	seqBefore := n.value("SELECT commit_seq FROM meta")
	look := func() {
		t.Helper()
		if err := n.watchClocks(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	look()
	if seq := n.value("SELECT commit_seq FROM meta"); seq != seqBefore {
		t.Errorf("%s commits without a reason, %s before", seq, seqBefore)
	}
	for _, set := range []time.Duration{-3 * time.Hour, 30 * time.Minute, 0} {
		ahead.Store(int64(set))
		before := n.value("SELECT commit_seq FROM meta")
		look()
		if n.value("SELECT commit_seq - ? FROM meta", before) != "3" {
			t.Errorf("set by %v: commits %s, were %s; want three more", set, n.value("SELECT commit_seq FROM meta"), before)
		}
		if got := n.value("SELECT count(*) FROM inbox WHERE agent = 'a' AND abs(due_us - at_us + ?) < 100000", set.Microseconds()); got != fmt.Sprint(many) {
			t.Errorf("set by %v: %s of %d timers follow", set, got, many)
		}
		if got := n.value(`SELECT count(*) FROM run r WHERE agent = 'a' AND status = 'waiting' AND wake_us = (SELECT min(due_us) FROM inbox i WHERE i.run = r.id)`); got != "20" {
			t.Errorf("set by %v: %s of 20 runs wait for their first timer", set, got)
		}
		if got := n.value(inHand); got != pausedBefore {
			t.Errorf("set by %v: the end of a pause after an error, and its input's due time, are %s, not %s", set, got, pausedBefore)
		}
	}
	ahead.Store(int64(3 * time.Hour)) // all are due
	look()
	n.settle()
	if got := n.value("SELECT count(*) FROM inbox WHERE agent = 'a' AND consumed_step IS NULL"); got != "0" {
		t.Errorf("%s timers were not taken when the clock reached them", got)
	}
}

// Order within a run is by max(arrival, due), then arrival, also of timers that moved.
func TestOrderOfTimersThatMoved(t *testing.T) {
	n := newNode(t, one(scripted), Options{})
	var ahead atomic.Int64
	n.clocks.Wall = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	n.restart(t, one(scripted), Options{})
	now := time.Now().Truncate(time.Millisecond)
	submit := func(id string, in time.Duration, at time.Time) {
		t.Helper()
		input := Input{Tenant: "d", Agent: "a", Run: "r", ID: id, Type: "t", Data: []byte("{}"), Source: "cli", In: in}
		if !at.IsZero() {
			input.AtUS = at.UnixMicro()
		}
		if _, err := Submit(t.Context(), n.store, input); err != nil {
			t.Fatal(err)
		}
	}
	submit("at 20m", 0, now.Add(20*time.Minute))
	submit("at 2h", 0, now.Add(2*time.Hour))
	submit("at 10m", 0, now.Add(10*time.Minute))
	submit("past", 0, now.Add(-time.Hour))
	submit("plain", 0, time.Time{})
	submit("in 2h", 2*time.Hour, time.Time{})
	if err := n.watchClocks(t.Context()); err != nil { // as at start
		t.Fatal(err)
	}
	ahead.Store(int64(time.Hour))
	if err := n.watchClocks(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.settle()
	// Those that the clock reached are due when it was set, in order of their arrival.
	if got, want := n.stepInputs("r"), []string{"past", "plain", "at 20m", "at 10m"}; !slices.Equal(got, want) {
		t.Errorf("steps took %q, want %q", got, want)
	}
}

// A node that has nothing to do lets the next process know that it saw the time pass; without one, a day counts.
func TestWindowsCountADayOfDowntime(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWatch(today)
		agents := one(func(context.Context, agent.Step) (agent.Effects, error) { return agent.Effects{}, nil })
		o := Options{Poll: 40 * time.Minute}
		n := newTimed(t, w, dir, agents, o)
		const day = 24 * time.Hour
		skipped := func() time.Duration {
			t.Helper()
			us := n.value("SELECT skip_us FROM meta")
			d, err := time.ParseDuration(us + "us")
			if err != nil {
				t.Fatal(err)
			}
			return d.Round(time.Hour)
		}
		stop := n.start(t)
		pass(5 * day)
		stop()
		n.restart(t, agents, o)
		if got := skipped(); got != 0 {
			t.Errorf("%v of the time that a node saw pass are skipped", got)
		}
		stop = n.start(t)
		pass(day)
		stop()
		pass(20 * time.Hour)
		n.restart(t, agents, o)
		if got := skipped(); got != 0 {
			t.Errorf("%v of 20 hours of downtime are skipped", got)
		}
		pass(5 * day)
		n.restart(t, agents, o)
		if got := skipped(); got != 4*day {
			t.Errorf("%v of five days of downtime are skipped, want four", got)
		}
		w.set(w.now().Add(3 * day))
		w.reboot()
		n.clocks = w.clocks()
		n.restart(t, agents, o)
		if got := skipped(); got != 6*day {
			t.Errorf("%v are skipped after the machine was off for three days, want six", got)
		}
		w.set(w.now().AddDate(50, 0, 0)) // the machine saw no years pass
		n.restart(t, agents, o)
		if got := skipped(); got != 6*day {
			t.Errorf("%v are skipped after the clock was set ahead", got)
		}
	})
}

// A database of schema 1 goes on where its node stopped.
func TestNodeGoesOnWithAnUpgradedDatabase(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "node.db")
	oldNode(t, path)
	synctest.Test(t, func(t *testing.T) {
		// The old node stopped a minute ago.
		const last = 1796058084173101
		w, d := newWatch(time.UnixMicro(last).Add(time.Minute)), &diary{start: time.Now()}
		agents := map[string]agent.Agent{}
		for _, name := range []string{"a", "broken", "busy", "retry"} {
			agents[name] = agent.Func(func(ctx context.Context, s agent.Step) (agent.Effects, error) {
				d.note(s.Run + " " + s.Input.ID)
				return scripted(ctx, s)
			})
		}
		o := Options{Poll: 10 * time.Second}
		n := newTimed(t, w, dir, agents, o)
		if got := n.value("SELECT node || ' ' || epoch || ' ' || client_id FROM meta"); got != "n1 1796058085 postrider-n1-PI2DGVHAEZ" {
			t.Errorf("the node is %s", got)
		}
		paused, plain := n.show("paused"), n.exported("plain")
		if paused.Status != "paused" || paused.LastError != "no such luck" || len(plain) != 4 {
			t.Errorf("paused run %+v, records %q", paused.RunInfo, plain)
		}
		n.start(t)
		pass(time.Minute)
		d.mustSay(t, "pending 1 0s", "hand 1 0s")
		n.mustBe("pending", "idle", `{"kept": 12345678901234567890}`)
		for id, dup := range map[string]bool{"3": true, "4": false} {
			data := map[string]string{"3": `{"commands":[{"agent":"billing@hq","run":"inv-7","type":"charge","id":"c-1","data":{"sum":0.10}}]}`, "4": `{"state": 5}`}[id]
			if out, err := n.trySend("a", "plain", id, data); err != nil || out.Duplicate != dup {
				t.Errorf("input %s sent again: %+v, %v", id, out, err)
			}
		}
		if _, err := n.trySend("a", "done", "2", "{}"); err == nil {
			t.Error("a run that is done took an input")
		}
		pass(57 * time.Minute) // the hour began a minute before the bubble did
		d.mustSay(t, "pending 1 0s", "hand 1 0s", "plain 4 1m0s")
		pass(2 * time.Minute)
		d.mustSay(t, "pending 1 0s", "hand 1 0s", "plain 4 1m0s", "timers pr:n1/d/timers/soon 58m0s", "busy 1 58m0s")
		pass(time.Hour)
		if got := n.value("SELECT group_concat(run_name || ' ' || input_id || ' ' || reason, ', ') FROM inbox WHERE outcome = 'dead' AND ended_us > ?", last); got != "timers pr:n1/d/timers/brief expired before its step" {
			t.Errorf("dead letters: %s", got)
		}
		if got := n.show("paused"); got.Status != "paused" || got.Pending != 1 {
			t.Errorf("the paused run is %s with %d inputs", got.Status, got.Pending)
		}
		if in := n.show("timers"); in.Status != "waiting" || in.Pending != 1 {
			t.Errorf("run timers: %+v", in.RunInfo)
		}
		if got := n.rewind("rewound", 1); got.Gen != 3 {
			t.Errorf("a rewind opened gen %d, want 3", got.Gen)
		}
		if got := n.value("SELECT min(id) FROM inbox WHERE id > 17"); got != "31" {
			t.Errorf("the first new input has row %s: an id came back", got)
		}
	})
}

// oldNode makes a database as schema 1 left it.
func oldNode(t *testing.T, path string) {
	t.Helper()
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join("..", "testdata", "schema", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"PRAGMA auto_vacuum = INCREMENTAL", "PRAGMA journal_mode = WAL", read("node-1.sql"), read("node-1-rows.sql"),
		"PRAGMA application_id = 0x50535452", "PRAGMA user_version = 1"} {
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// A time that can only be a mistake is refused by its name, and nothing is stored.
func TestAbsurdTimesAreRefused(t *testing.T) {
	n := newNode(t, one(scripted), quick)
	before := dump(t, n.store, false)
	for _, c := range []struct {
		in   time.Duration
		at   int64
		want string
	}{
		{-time.Second, 0, "invalid in: -1s is negative"},
		{time.Second, 1, "invalid at: excludes in"},
		{0, -1, "invalid at: -1 microseconds is not a time from 1970 to 9999"},
		{0, time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro(), "invalid at: 253402300800000000 microseconds is not a time from 1970 to 9999"},
	} {
		_, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", Type: "t", Data: []byte("1"), Source: "cli", In: c.in, AtUS: c.at})
		var field *FieldError
		if !errors.As(err, &field) || err.Error() != c.want {
			t.Errorf("in %v, at %d: %v, want %s", c.in, c.at, err, c.want)
		}
	}
	mustEqual(t, "after refusals", dump(t, n.store, false), before)
	for _, at := range []int64{1, time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC).UnixMicro()} {
		if _, err := Submit(t.Context(), n.store, Input{Tenant: "d", Agent: "a", Run: "r", Type: "t", Data: []byte("1"), Source: "cli", AtUS: at}); err != nil {
			t.Errorf("at %d: %v", at, err)
		}
	}

	late := time.Date(9900, 1, 1, 0, 0, 0, 0, time.UTC)
	for want, cmd := range map[string]agent.Command{
		"in: 2400000h0m0s leads beyond the year 9999":         {In: 2_400_000 * time.Hour},
		"expires_in: 2400000h0m0s leads beyond the year 9999": {ExpiresIn: 2_400_000 * time.Hour},
		"at: 10000 is not a year from 1970 to 9999":           {At: time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("", -3600))},
		"at: 1969 is not a year from 1970 to 9999":            {At: time.Date(1970, 1, 1, 0, 30, 0, 0, time.FixedZone("", 3600))},
	} {
		cmd.Type = "t"
		_, err := limits{node: "n1", maxRecord: 1000, hosted: n.hosted}.plan(&claim{agent: "a", name: "r", tenant: "d"}, agent.Effects{Commands: []agent.Command{cmd}},
			late.UnixMicro(), late.UnixMicro())
		if err == nil || err.Error() != "commands[0]."+want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if us, err := ParseTime("2026-01-31T13:00:00.000001+01:00"); err != nil || us != time.Date(2026, 1, 31, 12, 0, 0, 1000, time.UTC).UnixMicro() {
		t.Errorf("parsed %d, %v", us, err)
	}
}
