//go:build faults

package main

import (
	"bytes"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
)

// These tests run the example for other languages, testdata/consumer, against a real broker. python3 with paho-mqtt is
// needed; without it they fail and never skip.

// python is an interpreter that has the MQTT client. Debian's has Debian's packages, also where another one is called python3.
func python(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(name, "-c", "import paho.mqtt.client").Run() == nil {
			return name
		}
	}
	t.Fatal("no python3 has paho-mqtt: apt-get install python3-paho-mqtt")
	return ""
}

// pupil is the example consumer, which is killed and started again.
type pupil struct {
	t      *testing.T
	python string
	db     string
	proxy  *mqtttest.Proxy // between it and its broker
	*spawned
	starts int
}

func newPupil(t *testing.T, broker string) *pupil {
	t.Helper()
	return &pupil{t: t, python: python(t), db: filepath.Join(t.TempDir(), "events.db"), proxy: mqtttest.NewProxy(t, strings.TrimPrefix(broker, "tcp://"))}
}

// start starts it behind a prefix such as strace's. Its stderr is log(starts).
func (p *pupil) start(prefix ...string) {
	p.t.Helper()
	p.starts++
	args := append([]string{"-c", `exec "$@" 2>"$0"`, p.logFile()}, prefix...)
	args = append(args, p.python, "-B", "testdata/consumer/consumer.py", p.db, "pupil", p.proxy.Addr())
	p.spawned = spawn(p.t, "sh", args...)
}

func (p *pupil) logFile() string { return fmt.Sprintf("%s.%d.log", p.db, p.starts) }

func (p *pupil) log() string {
	b, err := os.ReadFile(p.logFile())
	if err != nil && !os.IsNotExist(err) {
		p.t.Fatal(err)
	}
	return string(b)
}

func (p *pupil) awaitSubscribed() {
	p.t.Helper()
	mqtttest.Eventually(p.t, "the consumer is subscribed", func() bool {
		if p.ended() {
			p.t.Fatalf("the consumer ended: %v\n%s", p.err, p.log())
		}
		return strings.Contains(p.log(), "subscribed\n")
	})
}

func (p *pupil) kill() { p.end(syscall.SIGKILL) }

// lineage is what the consumer knows of a run, /NODE/TENANT/RUN.
func (p *pupil) lineage(run string) string {
	p.t.Helper()
	return output(p.t, p.python, "-B", "testdata/consumer/fold.py", p.db, run)
}

// number asks the consumer's database.
func (p *pupil) number(query string) (n int) {
	p.t.Helper()
	db, err := sql.Open("sqlite", "file:"+p.db+"?mode=ro&_pragma=busy_timeout(5000)")
	if err != nil {
		p.t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRow(query).Scan(&n); err != nil {
		p.t.Fatal(err)
	}
	return n
}

// Two consumers of one stream, ours and the example in another language, through lost PUBACKs, kills of the relay and of
// the consumer, and a rewind that undoes what both have: they come to the same, byte for byte, each record once.
func TestExampleConsumerCountsOnce(t *testing.T) {
	t.Setenv("POSTRIDER_LISTEN", "off")
	bin, dir := binary(t), t.TempDir()
	db, foldDB := filepath.Join(dir, "n.db"), filepath.Join(dir, "f.db")
	_, url := mosquitto(t)
	p := newPupil(t, url)
	p.start()
	p.awaitSubscribed()
	foldProxy := mqtttest.NewProxy(t, strings.TrimPrefix(url, "tcp://"))
	spawn(t, bin, "fold", "--broker", foldProxy.URL(), "--db", foldDB)
	serve := spawn(t, bin, "serve", "--no-relay", "--node", "n", "--agent", "counter=go:counter", "--db", db)
	mqtttest.Eventually(t, "an input is taken", func() bool {
		if serve.ended() {
			t.Fatal("serve ended")
		}
		return exec.Command(bin, "send", "counter", "r0", "--id", "0", "--db", db).Run() == nil
	})
	foldProxy.Await("the fold is subscribed", func(c mqtttest.Counts) bool { return c.Subscribes > 0 })
	send := func(from, to int) {
		for i := from; i < to; i++ {
			output(t, bin, "send", "counter", fmt.Sprintf("r%d", i%3), "--id", strconv.Itoa(i), "--db", db)
		}
	}
	relayProxy := mqtttest.NewProxy(t, strings.TrimPrefix(url, "tcp://"))
	startRelay := func() *spawned { return spawn(t, bin, "relay", "--broker", relayProxy.URL(), "--db", db) }
	type head struct {
		Branch    string
		Step, LSN int64
	}
	// shipped waits until the runs are at these steps and all of it is shipped.
	shipped := func(steps ...int64) (heads []head) {
		t.Helper()
		for i, want := range steps {
			var h head
			mqtttest.Eventually(t, fmt.Sprintf("r%d is at step %d", i, want), func() bool {
				out := output(t, bin, "runs", "show", fmt.Sprintf("r%d", i), "--db", db, "-o", "json")
				if err := json.Unmarshal([]byte(out), &h); err != nil {
					t.Fatal(err)
				}
				return h.Step == want
			})
			heads = append(heads, h)
		}
		mqtttest.Eventually(t, "everything is shipped", func() bool {
			return strings.Contains(output(t, bin, "outbox", "stats", "--db", db, "-o", "json"), `"pending":0`)
		})
		return heads
	}
	// lose starts a relay, lets what it ships arrive and its PUBACKs get lost, kills it and starts another one.
	lose := func(n int) *spawned {
		t.Helper()
		lost := relayProxy.Counts().DroppedPubacks + n
		relayProxy.DropPubacks(-1)
		relay := startRelay()
		relayProxy.Await("PUBACKs are lost", func(c mqtttest.Counts) bool { return c.DroppedPubacks >= lost })
		relay.end(syscall.SIGKILL)
		relayProxy.DropPubacks(0)
		return startRelay()
	}

	relay := startRelay()
	send(1, 12)
	shipped(4, 4, 4)
	relay.end(syscall.SIGKILL)
	send(12, 18)
	relay = lose(6)
	delivered := p.proxy.Counts().Delivered
	p.proxy.Await("the consumer has some of it", func(c mqtttest.Counts) bool { return c.Delivered > delivered })
	p.kill()
	send(18, 24) // while the consumer is away
	shipped(8, 8, 8)
	p.start()
	output(t, bin, "rewind", "r1", "--to", "2", "--db", db)
	send(24, 30)
	p.awaitSubscribed()
	p.kill() // with whatever it has in hand
	relay.end(syscall.SIGKILL)
	send(30, 36)
	lose(6)
	p.start()
	send(36, 42)

	for i, node := range shipped(14, 8, 14) {
		r := fmt.Sprintf("r%d", i)
		var want []byte
		mqtttest.Eventually(t, "the fold has the live line of "+r, func() bool {
			out, err := exec.Command(bin, "fold", "show", r, "--db", foldDB, "-o", "json").Output()
			want = out
			return err == nil && strings.Contains(string(out), fmt.Sprintf(`"branch":%q,"lsn":%d,`, node.Branch, node.LSN))
		})
		if n := int64(bytes.Count(want, []byte(`"type":"counted"`))); n != node.Step {
			t.Errorf("%s has %d events after %d steps", r, n, node.Step)
		}
		var got string
		mqtttest.Eventually(t, "the consumer has all of "+r, func() bool {
			got = p.lineage("/n/default/" + r)
			return strings.Contains(got, fmt.Sprintf(`"branch":%q,"lsn":%d,`, node.Branch, node.LSN))
		})
		if got != string(want) {
			t.Errorf("the consumer shows of %s\n%swant\n%s", r, got, want)
		}
	}
	var v struct{ Records, Duplicates, Abandoned int }
	if err := json.Unmarshal([]byte(output(t, bin, "fold", "verify", "--db", foldDB, "-o", "json")), &v); err != nil {
		t.Fatal(err)
	}
	if v.Duplicates < 12 || v.Abandoned != 6 {
		t.Errorf("nothing came twice, or nothing was undone: %+v", v)
	}
	if rows, keys := p.number("SELECT count(*) FROM record"), p.number("SELECT count(DISTINCT source || ' ' || lsn) FROM record"); rows != v.Records || keys != v.Records {
		t.Errorf("the consumer has %d rows of %d records, want %d of each", rows, keys, v.Records)
	}
	if c := p.proxy.Counts(); c.Delivered < v.Records+12 {
		t.Errorf("the consumer was given %d messages for %d records: no duplicates", c.Delivered, v.Records)
	}
	for ; p.starts > 0; p.starts-- {
		if log := p.log(); strings.Contains(log, "CONFLICT") || strings.Contains(log, "set aside") || strings.Contains(log, "Traceback") {
			t.Errorf("start %d of the consumer: %s", p.starts, log)
		}
	}
}

// counted is event lsn of a run that does nothing but count.
func counted(lsn int64) *record.Record {
	r := &record.Record{
		Node: "n", Key: record.BranchKey{Tenant: "default", Run: "r", Branch: "01KE0Z3Q6V4W8N2M5T7R9X1Y3B"}, LSN: lsn, PrevLSN: lsn - 1,
		Gen: 1, Epoch: 1, Step: lsn, Kind: record.Event, Type: "counted", Data: fmt.Appendf(nil, `{"n": %d}`, lsn), Occurred: 1, Recorded: 1,
	}
	if lsn == 1 {
		r.Type = record.TypeRunStarted
	}
	return r
}

func publishCounted(t *testing.T, url string, n int64) {
	t.Helper()
	c, err := mqtt.Dial(t.Context(), mqtt.Options{Broker: url, ClientID: "node"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for lsn := int64(1); lsn <= n; lsn++ {
		r := counted(lsn)
		d := c.Publish(record.Topics{}.Of(r), false, r.AppendCloudEvent(nil))
		<-d.Done()
		if err := d.Error(); err != nil {
			t.Fatal(err)
		}
	}
}

// The consumer is killed inside a commit, at any write of it, or its disk fails there: what was delivered and is not
// stored was not acknowledged, so it comes again. At the end nothing is missing and nothing is there twice.
func TestExampleConsumerLosesNothingInACommit(t *testing.T) {
	const events = 100
	_, url := mosquitto(t)
	p := newPupil(t, url)
	p.start()
	p.awaitSubscribed()
	p.kill()
	publishCounted(t, url, events)
	stored := 0
	// A commit may be in whose PUBACK is not out, never the other way round.
	check := func(how string) {
		t.Helper()
		rows, acks := p.number("SELECT count(*) FROM record"), p.proxy.Counts().ClientPubacks
		if acks > rows {
			t.Errorf("%s: %d PUBACKs for %d records that are stored", how, acks, rows)
		}
		stored = rows
	}
	// Nothing but a commit writes to the log.
	start := func(fault string) {
		p.start("strace", "-f", "-qq", "-o", "/dev/null", "-P", p.db+"-wal", "-e", "trace=pwrite64", "-e", "inject=pwrite64:"+fault)
	}
	for at := 1; at <= 12; at++ {
		start(fmt.Sprintf("signal=KILL:when=%d", at))
		mqtttest.Eventually(t, fmt.Sprintf("the consumer is killed at write %d", at), p.ended)
		check(fmt.Sprintf("killed at write %d", at))
		if p.err == nil || p.err.Error() != "signal: killed" {
			t.Errorf("at write %d the consumer ended by itself: %v\n%s", at, p.err, p.log())
		}
	}
	if stored == 0 {
		t.Error("every kill came in the first commit")
	}
	for at := 1; at <= 6; at++ {
		start(fmt.Sprintf("error=ENOSPC:when=%d+", at))
		mqtttest.Eventually(t, fmt.Sprintf("the consumer ends for its disk fails from write %d", at), p.ended)
		check(fmt.Sprintf("disk full from write %d", at))
		if log := p.log(); p.err == nil || !strings.Contains(log, ", in fold\n") || !strings.Contains(log, "disk") {
			t.Errorf("the consumer ended with %v and said\n%s", p.err, log)
		}
	}
	if stored == events {
		t.Error("all was stored before the last fault: it proves nothing")
	}
	p.start()
	mqtttest.Eventually(t, "everything is stored", func() bool { return p.number("SELECT count(*) FROM event") == events })
	if rows := p.number("SELECT count(*) FROM record"); rows != events {
		t.Errorf("%d rows for %d events", rows, events)
	}
	if got, want := p.lineage("/n/default/r"), fmt.Sprintf(`"lsn":%d,"records":[`, events); !strings.Contains(got, want) {
		t.Errorf("shown %s", got)
	}
}
