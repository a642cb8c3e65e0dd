package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang" //nolint:depguard // as it comes, it is the yardstick

	"postrider/executor"
	"postrider/internal/agent"
	"postrider/internal/devbroker"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

const (
	benchRounds   = 5
	benchBranches = 100
	benchWindow   = 1024
	relaySteps    = 150 // of each branch in a round, with two records each
	naiveSteps    = 5
	dataSize      = 300
)

// BenchmarkRelay compares the relay with two others that send the same topics and payloads to the same broker, to which
// nobody is subscribed: stock paho (no outbox at all, window 1024), and the relay that everybody writes first (read one
// record, publish it, wait for its PUBACK, commit that, next). The relay's clock runs from its start to the commit of
// the last shipped mark, stock paho's from its dial to the last PUBACK. The three take turns; ratio and naive-ratio are
// the medians of the rounds' ratios.
func BenchmarkRelay(b *testing.B) {
	b.Run("broker=devbroker", func(b *testing.B) {
		broker, err := devbroker.Start("127.0.0.1:0", nil)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(broker.Close)
		benchRelay(b, broker.URL())
	})
	b.Run("broker=mosquitto", func(b *testing.B) {
		benchRelay(b, startMosquitto(b))
	})
}

func benchRelay(b *testing.B, broker string) {
	n := newBenchNode(b)
	n.ship(b, broker) // what made the runs
	var ours, stocks, naives time.Duration
	var ratios, naiveRatios []float64
	records, naiveRecords := 0, 0
	b.ReportAllocs()
	for b.Loop() { // an iteration is all rounds, whatever -benchtime says
		for range benchRounds {
			n.backlog(b, relaySteps)
			sent := n.pending(b)
			o := n.ship(b, broker)
			s := stock(b, broker, sent)
			n.backlog(b, naiveSteps)
			c := len(n.pending(b))
			v := n.shipNaively(b, broker)
			ratios = append(ratios, s.Seconds()/o.Seconds())
			naiveRatios = append(naiveRatios, v.Seconds()/float64(c)/(o.Seconds()/float64(len(sent))))
			ours, stocks, naives = ours+o, stocks+s, naives+v
			records, naiveRecords = records+len(sent), naiveRecords+c
		}
	}
	slices.Sort(ratios)
	slices.Sort(naiveRatios)
	b.ReportMetric(float64(records)/ours.Seconds(), "records/s")
	b.ReportMetric(float64(records)/stocks.Seconds(), "stock-records/s")
	b.ReportMetric(float64(naiveRecords)/naives.Seconds(), "naive-records/s")
	b.ReportMetric(naiveRatios[len(naiveRatios)/2], "naive-ratio")
	b.ReportMetric(ratios[len(ratios)/2], "ratio")
	b.ReportMetric(0.7, "bar")
}

// benchNode makes backlogs by real steps, with no relay running.
type benchNode struct {
	store *sqlite.Store
	box   *outbox.Outbox
}

func newBenchNode(b *testing.B) *benchNode {
	b.Helper()
	text, err := os.ReadFile("../schema.sql")
	if err != nil {
		b.Fatal(err)
	}
	path := filepath.Join(b.TempDir(), "node.db")
	store, err := sqlite.Open(b.Context(), path, sqlite.NodeSchema(string(text), nodeName, path), sqlite.Options{Create: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := store.Close(); err != nil {
			b.Error(err)
		}
	})
	n := &benchNode{store, outbox.New(store, nodeName)}
	n.backlog(b, 1)
	return n
}

// backlog has every run take some steps, side by side.
func (n *benchNode) backlog(b *testing.B, steps int64) {
	b.Helper()
	pad := strings.Repeat("x", dataSize)
	step := func(_ context.Context, s agent.Step) (agent.Effects, error) {
		left := steps // the state counts them down
		if s.Input == nil {
			if err := json.Unmarshal(s.State, &left); err != nil {
				return agent.Effects{}, err
			}
		}
		left--
		e := agent.Effects{State: fmt.Appendf(nil, "%d", left)}
		for i := range 2 {
			data := fmt.Appendf(nil, `{"n":%d,"i":%d,"pad":"`, s.Number, i)
			data = append(data, pad[:dataSize-len(data)-2]+`"}`...)
			e.Events = append(e.Events, agent.Event{Type: "counted", Data: data})
		}
		if left > 0 {
			e.Next = agent.Continue
		}
		return e, nil
	}
	var toDo atomic.Int64
	toDo.Store(steps * benchBranches)
	all := make(chan struct{})
	ex := executor.New(n.store, nodeName, map[string]agent.Agent{"a": agent.Func(step)}, executor.Options{Notify: func() {
		if toDo.Add(-1) == 0 {
			close(all)
		}
	}})
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- ex.Run(ctx) }()
	hosted := func() (yes bool) {
		if err := n.store.Get(ctx, "SELECT EXISTS (SELECT 1 FROM agent)", nil, &yes); err != nil {
			b.Fatal(err)
		}
		return yes
	}
	mqtttest.Eventually(b, "the agent is hosted", hosted)
	for r := range benchBranches {
		in := executor.Input{Tenant: "default", Agent: "a", Run: fmt.Sprintf("run-%d", r), Type: "go", Data: []byte("null"), Source: "cli"}
		if _, err := executor.Submit(ctx, n.store, in); err != nil {
			b.Fatal(err)
		}
	}
	ex.Wake()
	select {
	case <-all:
	case <-time.After(patience):
		b.Fatalf("%d steps are still to do", toDo.Load())
	}
	cancel()
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
}

type message struct {
	topic   string
	payload []byte
}

// pending is what the relay will send, in its order.
func (n *benchNode) pending(b *testing.B) (list []message) {
	b.Helper()
	var cursor outbox.Cursor
	topics := record.Topics{Root: root}
	for {
		items, err := n.box.Drain(b.Context(), "", &cursor, 512)
		if err != nil {
			b.Fatal(err)
		}
		if len(items) == 0 {
			return list
		}
		for i := range items {
			list = append(list, message{topics.Of(&items[i].Record), items[i].AppendCloudEvent(nil)})
		}
	}
}

// ship times the relay until nothing is pending.
func (n *benchNode) ship(b *testing.B, broker string) time.Duration {
	b.Helper()
	r := newRelay(n.store, broker, nil, relay.Options{})
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	done := make(chan error, 1)
	runtime.GC()
	begin := time.Now()
	go func() { done <- r.Run(ctx) }()
	look := time.NewTicker(2 * time.Millisecond)
	defer look.Stop()
	for pending := true; pending; <-look.C {
		if err := n.store.Get(ctx, "SELECT EXISTS (SELECT 1 FROM branch WHERE shipped < exportable)", nil, &pending); err != nil {
			b.Fatal(err)
		}
		if time.Since(begin) > patience {
			b.Fatal("the relay does not come to its end")
		}
	}
	took := time.Since(begin)
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	return took
}

func dialStock(b *testing.B, broker string) paho.Client {
	b.Helper()
	c := paho.NewClient(paho.NewClientOptions().AddBroker(broker).SetClientID("stock").SetCleanSession(true).SetAutoReconnect(false))
	if t := c.Connect(); t.Wait() && t.Error() != nil {
		b.Fatal(t.Error())
	}
	return c
}

// stock times paho with its defaults, but for what makes its tokens true, and a full window.
func stock(b *testing.B, broker string, list []message) time.Duration {
	b.Helper()
	runtime.GC()
	begin := time.Now()
	c := dialStock(b, broker)
	flight := make(chan paho.Token, benchWindow-2) // and one in each goroutine's hands
	failed := make(chan error, 1)
	go func() {
		defer close(failed)
		for t := range flight {
			if t.Wait(); t.Error() != nil {
				failed <- t.Error()
				return
			}
		}
	}()
	for _, m := range list {
		select {
		case flight <- c.Publish(m.topic, 1, false, m.payload):
		case err := <-failed:
			b.Fatal(err)
		}
	}
	close(flight)
	if err := <-failed; err != nil {
		b.Fatal(err)
	}
	took := time.Since(begin)
	c.Disconnect(100)
	return took
}

// shipNaively times publish, wait, commit, one by one.
func (n *benchNode) shipNaively(b *testing.B, broker string) time.Duration {
	b.Helper()
	ctx := b.Context()
	fence, err := n.box.Lease(ctx, "naive")
	if err != nil {
		b.Fatal(err)
	}
	topics := record.Topics{Root: root}
	var cursor outbox.Cursor
	runtime.GC()
	begin := time.Now()
	c := dialStock(b, broker)
	for {
		items, err := n.box.Drain(ctx, "", &cursor, 1)
		if err != nil {
			b.Fatal(err)
		}
		if len(items) == 0 {
			break
		}
		it := &items[0]
		if t := c.Publish(topics.Of(&it.Record), 1, false, it.AppendCloudEvent(nil)); t.Wait() && t.Error() != nil {
			b.Fatal(t.Error())
		}
		if err := n.box.Ack(ctx, fence, []outbox.Shipped{{Branch: it.Branch, LSN: it.LSN, Bytes: it.Bytes, Recorded: it.Recorded}}); err != nil {
			b.Fatal(err)
		}
	}
	took := time.Since(begin)
	c.Disconnect(100)
	return took
}

// startMosquitto runs a broker in a process of its own, where there is one.
func startMosquitto(b *testing.B) (url string) {
	b.Helper()
	path, err := exec.LookPath("mosquitto")
	if err != nil {
		if path, err = exec.LookPath("/usr/sbin/mosquitto"); err != nil { // where Debian puts it, off a user's path
			b.Skip("mosquitto is not installed: only the broker in the process was measured")
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	addr := l.Addr().(*net.TCPAddr)
	l.Close()
	conf := filepath.Join(b.TempDir(), "mosquitto.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, "listener %d 127.0.0.1\nallow_anonymous true\n", addr.Port), 0o600); err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(path, "-c", conf)
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil {
			b.Error(err)
		}
		_ = cmd.Wait() // says that it was killed
	})
	mqtttest.Eventually(b, "mosquitto listens", func() bool {
		c, err := net.Dial("tcp", addr.String())
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
	return "tcp://" + addr.String()
}
