//go:build faults

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"postrider/internal/mqtttest"
)

// These tests break the disk under the real binary: strace lets its fsync calls fail, or kills it inside one. A missing
// strace fails them; they never skip.

// binary builds the program once per test.
func binary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "postrider")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

// spawned is a command that the end of the test kills.
type spawned struct {
	*exec.Cmd
	done   chan struct{}
	stdout bytes.Buffer
	err    error // after done
}

func spawn(t *testing.T, name string, args ...string) *spawned {
	t.Helper()
	s := &spawned{Cmd: exec.Command(name, args...), done: make(chan struct{})}
	s.Stdout = &s.stdout
	s.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // strace and what it runs end together
	s.WaitDelay = 5 * time.Second
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { s.err = s.Wait(); close(s.done) }()
	t.Cleanup(func() { s.end(syscall.SIGKILL) })
	return s
}

func (s *spawned) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// end signals the process and waits for it; ending it again is fine.
func (s *spawned) end(signal syscall.Signal) {
	if !s.ended() {
		_ = syscall.Kill(-s.Process.Pid, signal)
	}
	<-s.done
}

// output runs a command to its end.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, &stderr)
	}
	return string(out)
}

const syncs = "fsync,fdatasync"

var injected = regexp.MustCompile(`(?m)^.*(fsync|fdatasync)\(.*\(INJECTED\)$`)

// breakSyncs lets every fsync of a running process fail until mend is called. failures counts those that did.
func breakSyncs(t *testing.T, pid int) (failures func() int, mend func()) {
	t.Helper()
	trace := filepath.Join(t.TempDir(), "trace")
	strace := spawn(t, "strace", "-f", "-p", strconv.Itoa(pid), "-o", trace, "-e", "trace="+syncs, "-e", "inject="+syncs+":error=EIO")
	mqtttest.Eventually(t, "strace is attached", func() bool {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(string(b), "TracerPid:\t"+strconv.Itoa(strace.Process.Pid))
	})
	failures = func() int { return failed(t, trace) }
	return failures, func() { strace.end(syscall.SIGINT) }
}

// failed counts the failures that a trace has.
func failed(t *testing.T, trace string) int {
	t.Helper()
	b, err := os.ReadFile(trace)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // it appears with the first call
		t.Fatal(err)
	}
	return len(injected.FindAll(b, -1))
}

func published(f *mqtttest.Fake, what string) (n int) {
	for _, p := range f.Published() {
		if strings.Contains(p.Payload, what) {
			n++
		}
	}
	return n
}

type shownRun struct {
	Step  int64
	State json.RawMessage
}

func showRun(t *testing.T, bin, db string) (r shownRun) {
	t.Helper()
	if err := json.Unmarshal([]byte(output(t, bin, "runs", "show", "r", "--db", db, "-o", "json")), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// G2: while a node's fsyncs fail, no step of it counts and no record of it ships; when they work again it goes on exactly
// where it was.
func TestNothingShipsThatWasNotSynced(t *testing.T) {
	bin, broker, db := binary(t), mqtttest.NewFake(t), filepath.Join(t.TempDir(), "n.db")
	serve := spawn(t, bin, "serve", "--node", "n", "--agent", "counter=go:counter", "--broker", broker.URL(), "--db", db)
	mqtttest.Eventually(t, "the first input is taken", func() bool {
		return exec.Command(bin, "send", "counter", "r", "--id", "1", "--db", db).Run() == nil
	})
	mqtttest.Eventually(t, "the first step is shipped", func() bool { return published(broker, `"n":1`) == 1 })
	mqtttest.Eventually(t, "and acknowledged", func() bool {
		return strings.Contains(output(t, bin, "outbox", "stats", "--db", db, "-o", "json"), `"pending":0`)
	})
	failures, mend := breakSyncs(t, serve.Process.Pid)
	output(t, bin, "send", "counter", "r", "--id", "2", "--db", db) // by another process, whose disk works
	mqtttest.Eventually(t, "several fsyncs have failed", func() bool { return failures() >= 4 })
	if n := published(broker, `"n":2`); n != 0 {
		t.Errorf("the second step was shipped %d times and is not durable", n)
	}
	mend()
	mqtttest.Eventually(t, "the second step is shipped", func() bool { return published(broker, `"n":2`) > 0 })
	output(t, bin, "send", "counter", "r", "--id", "3", "--db", db)
	mqtttest.Eventually(t, "the third step is shipped", func() bool { return published(broker, `"n":3`) > 0 })
	if r := showRun(t, bin, db); r.Step != 3 || string(r.State) != `{"n":3}` {
		t.Errorf("run is at step %d with state %s after three inputs", r.Step, r.State)
	}
}

// G2: a sender whose commit cannot be synced gets no answer, and none that says yes.
func TestSenderIsNotAnsweredWithoutSync(t *testing.T) {
	bin, broker, db := binary(t), mqtttest.NewFake(t), filepath.Join(t.TempDir(), "n.db")
	serve := spawn(t, bin, "serve", "--node", "n", "--agent", "counter=go:counter", "--broker", broker.URL(), "--db", db)
	mqtttest.Eventually(t, "the first input is taken", func() bool {
		return exec.Command(bin, "send", "counter", "r", "--id", "1", "--db", db).Run() == nil
	})
	serve.end(syscall.SIGTERM)
	trace := filepath.Join(t.TempDir(), "trace")
	send := spawn(t, "strace", "-f", "-o", trace, "-e", "trace="+syncs, "-e", "inject="+syncs+":error=EIO",
		bin, "send", "counter", "r", "--id", "2", "--db", db)
	mqtttest.Eventually(t, "several fsyncs have failed, or the sender gave up", func() bool { return failed(t, trace) >= 4 || send.ended() })
	if send.ended() && send.err == nil {
		t.Error("the sender says yes")
	}
	send.end(syscall.SIGKILL)
	if out := send.stdout.String(); out != "" {
		t.Errorf("the sender was answered: %q", out)
	}
}

// G2, barrier: rows that a process killed inside its fsync left behind are visible and not durable. A relay whose own
// fsync fails ships none of them; one that can sync ships them once they are durable.
func TestRelayShipsNothingBeforeItsBarrier(t *testing.T) {
	bin := binary(t)
	died := 0
	for at := 1; at <= 12; at++ {
		t.Run(fmt.Sprintf("killed-at-%d", at), func(t *testing.T) {
			broker, db := mqtttest.NewFake(t), filepath.Join(t.TempDir(), "n.db")
			first := spawn(t, bin, "serve", "--node", "n", "--agent", "counter=go:counter", "--no-relay", "--db", db)
			mqtttest.Eventually(t, "an input is taken", func() bool {
				return exec.Command(bin, "send", "counter", "r", "--id", "0", "--db", db).Run() == nil
			})
			first.end(syscall.SIGTERM)
			for i := 1; i <= 5; i++ {
				output(t, bin, "send", "counter", "r", "--id", strconv.Itoa(i), "--db", db)
			}
			// Calls are counted per thread, so the place differs from run to run.
			killed := spawn(t, "strace", "-f", "-qq", "-o", filepath.Join(t.TempDir(), "trace"), "-e", "trace="+syncs,
				"-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", syncs, at),
				bin, "serve", "--no-relay", "--agent", "counter=go:counter", "--db", db)
			select {
			case <-killed.done:
				died++
			case <-time.After(3 * time.Second): // fewer calls than that: it did all its work
				killed.end(syscall.SIGTERM)
			}
			relayTrace := filepath.Join(t.TempDir(), "trace")
			broken := spawn(t, "strace", "-f", "-qq", "-o", relayTrace, "-e", "trace="+syncs, "-e", "inject="+syncs+":error=EIO",
				bin, "relay", "--broker", broker.URL(), "--db", db)
			mqtttest.Eventually(t, "the relay's fsyncs have failed", func() bool { return failed(t, relayTrace) >= 3 || broken.ended() })
			if failed(t, relayTrace) == 0 {
				t.Fatal("no fsync failed: that proves nothing")
			}
			broken.end(syscall.SIGKILL)
			if n := len(broker.Published()); n != 0 {
				t.Fatalf("%d records were shipped by a relay that could not make them durable", n)
			}
			spawn(t, bin, "relay", "--broker", broker.URL(), "--db", db)
			spawn(t, bin, "serve", "--no-relay", "--agent", "counter=go:counter", "--db", db)
			mqtttest.Eventually(t, "all six steps are shipped", func() bool { return published(broker, `"n":6`) > 0 })
			if r := showRun(t, bin, db); r.Step != 6 || string(r.State) != `{"n":6}` {
				t.Errorf("run is at step %d with state %s after six inputs", r.Step, r.State)
			}
			for n := 1; n <= 6; n++ {
				if published(broker, fmt.Sprintf(`"n":%d`, n)) == 0 {
					t.Errorf("step %d was never shipped", n)
				}
			}
		})
	}
	if died < 3 {
		t.Errorf("only %d of the processes were killed inside an fsync", died)
	}
}

// mosquitto runs a real broker on a free port.
func mosquitto(t *testing.T) (broker *spawned, url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	conf := filepath.Join(t.TempDir(), "mosquitto.conf")
	_, port, _ := strings.Cut(addr, ":")
	if err := os.WriteFile(conf, []byte("listener "+port+" 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	path, err := exec.LookPath("mosquitto")
	if err != nil {
		path = "/usr/sbin/mosquitto" // where Debian puts it, off a user's path
	}
	broker = spawn(t, path, "-c", conf)
	mqtttest.Eventually(t, "mosquitto listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
	return broker, "tcp://" + addr
}

// The whole way on a real broker, which stops answering in the middle and goes on: every process of its own.
func TestEverythingArrivesThroughARealBroker(t *testing.T) {
	bin, dir := binary(t), t.TempDir()
	db, foldDB := filepath.Join(dir, "n.db"), filepath.Join(dir, "f.db")
	broker, url := mosquitto(t)
	spawn(t, bin, "fold", "--broker", url, "--db", foldDB)
	mqtttest.Eventually(t, "the fold has its database", func() bool {
		return exec.Command(bin, "fold", "verify", "--db", foldDB).Run() == nil
	})
	spawn(t, bin, "serve", "--no-relay", "--node", "n", "--agent", "counter=go:counter", "--db", db)
	mqtttest.Eventually(t, "an input is taken", func() bool {
		return exec.Command(bin, "send", "counter", "r0", "--id", "0", "--db", db).Run() == nil
	})
	relay := spawn(t, bin, "relay", "--broker", url, "--db", db)
	send := func(from, to int) {
		for i := from; i < to; i++ {
			output(t, bin, "send", "counter", fmt.Sprintf("r%d", i%3), "--id", strconv.Itoa(i), "--db", db)
		}
	}
	send(1, 20)
	if err := broker.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	send(20, 40)
	relay.end(syscall.SIGKILL)
	relay = spawn(t, bin, "relay", "--broker", url, "--db", db)
	output(t, bin, "rewind", "r1", "--to", "2", "--db", db)
	if err := broker.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	send(40, 60)
	relay.end(syscall.SIGKILL)
	spawn(t, bin, "relay", "--broker", url, "--db", db)
	mqtttest.Eventually(t, "everything is shipped", func() bool {
		return strings.Contains(output(t, bin, "outbox", "stats", "--db", db, "-o", "json"), `"pending":0`)
	})
	for r, want := range map[string]int64{"r0": 20, "r2": 20} {
		mqtttest.Eventually(t, "the fold has all of "+r, func() bool {
			out, err := exec.Command(bin, "fold", "show", r, "--db", foldDB, "-o", "json").Output()
			var shown struct{ LSN int64 }
			return err == nil && json.Unmarshal(out, &shown) == nil && shown.LSN == want+1
		})
	}
	var node struct {
		Branch string
		LSN    int64
	}
	if err := json.Unmarshal([]byte(output(t, bin, "runs", "show", "r1", "--db", db, "-o", "json")), &node); err != nil {
		t.Fatal(err)
	}
	mqtttest.Eventually(t, "the fold has the live line of r1", func() bool {
		out, err := exec.Command(bin, "fold", "show", "r1", "--db", foldDB, "-o", "json").Output()
		return err == nil && strings.Contains(string(out), fmt.Sprintf(`"branch":%q,"lsn":%d,`, node.Branch, node.LSN))
	})
	if out, err := exec.Command(bin, "fold", "verify", "--db", foldDB).CombinedOutput(); err != nil {
		t.Errorf("fold verify: %v\n%s", err, out)
	}
}
