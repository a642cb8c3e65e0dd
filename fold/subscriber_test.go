package fold

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/devbroker"
	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
)

func startBroker(t testing.TB) *devbroker.Broker {
	t.Helper()
	b, err := devbroker.Start("", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// subscribe runs a subscriber until stop, or the end of the test. It returns once the broker has its session.
func subscribe(t testing.TB, f *Fold, o SubscriberOptions) (stop func()) {
	t.Helper()
	stop = startSubscriber(t, f, o)
	mqtttest.Eventually(t, "the fold is connected", func() bool { return connected(f) })
	return stop
}

func startSubscriber(t testing.TB, f *Fold, o SubscriberOptions) (stop func()) {
	t.Helper()
	o.MinBackoff, o.MaxBackoff = time.Millisecond, 20*time.Millisecond
	s, err := NewSubscriber(f, o)
	if err != nil {
		t.Fatal(err)
	}
	return runSubscriber(t, s)
}

// runSubscriber runs s until stop, or until the test ends.
func runSubscriber(t testing.TB, s *Subscriber) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			select {
			case err := <-ended:
				t.Errorf("Run returned before its context ended: %v", err)
				return
			default:
			}
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func connected(f *Fold) bool {
	reg := prometheus.NewRegistry()
	reg.MustRegister(f.metrics.connected)
	families, err := reg.Gather()
	return err == nil && families[0].GetMetric()[0].GetGauge().GetValue() == 1
}

// publish sends payloads and waits for their PUBACKs.
func publish(t testing.TB, b *devbroker.Broker, topic string, payloads ...[]byte) {
	t.Helper()
	c, err := mqtt.Dial(t.Context(), mqtt.Options{Broker: b.URL(), ClientID: "node"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var sent []mqtt.Delivery
	for _, p := range payloads {
		sent = append(sent, c.Publish(topic, false, p))
	}
	for _, d := range sent {
		<-d.Done()
		if err := d.Error(); err != nil {
			t.Fatal(err)
		}
	}
}

func publishRecords(t testing.TB, b *devbroker.Broker, records ...record.Record) {
	t.Helper()
	var payloads [][]byte
	for _, r := range records {
		payloads = append(payloads, r.AppendCloudEvent(nil))
	}
	publish(t, b, record.Topics{}.Of(&records[0]), payloads...)
}

// events are n events in order.
func events(n int64) (list []record.Record) {
	for lsn := int64(1); lsn <= n; lsn++ {
		list = append(list, ev("A", lsn, lsn-1))
	}
	return list
}

// awaitRecords waits for all of n: the broker may let new messages overtake those that it sends again.
func awaitRecords(t testing.TB, f *Fold, n int64) {
	t.Helper()
	mqtttest.Eventually(t, fmt.Sprintf("%d records are held", n), func() bool { return verify(t, f).Records >= n })
}

func broker(url string) SubscriberOptions {
	return SubscriberOptions{Broker: mqtt.Options{Broker: url}}
}

func TestAnnouncedFoldMissesNothingBeforeItRuns(t *testing.T) {
	b := startBroker(t)
	f := openNew(t, Options{})
	s, err := NewSubscriber(f, broker(b.URL()))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Announce(t.Context()); err != nil {
		t.Fatal(err)
	}
	publishRecords(t, b, events(20)...)
	stop := runSubscriber(t, s)
	awaitRecords(t, f, 20)
	stop()
	b.Close()
	if err := s.Announce(t.Context()); err == nil {
		t.Error("there is no broker, and no error")
	}
}

func TestSubscriberReceivesWhatWasPublishedWhileItWasAway(t *testing.T) {
	b := startBroker(t)
	path := t.TempDir() + "/fold.db"
	f := openAt(t, path, Options{})
	stop := subscribe(t, f, broker(b.URL()))
	list := events(600)
	publishRecords(t, b, list[:100]...)
	awaitRecords(t, f, 100)
	stop()
	if connected(f) {
		t.Error("the gauge still says connected")
	}
	f.Close()

	publishRecords(t, b, list[100:]...)
	f = openAt(t, path, Options{})
	defer f.Close()
	defer subscribe(t, f, broker(b.URL()))()
	awaitRecords(t, f, 600)
	if v := verify(t, f); !v.OK() || v.Records != 600 || v.Malformed != 0 {
		t.Errorf("%+v", v)
	}
}

// The broker has lost its sessions. It makes an empty one of the CONNECT, and says on the next connection that it has kept it.
func TestEmptySessionIsNotTakenForSubscribed(t *testing.T) {
	for name, gone := range map[string]func(packet mqtttest.Packet, up bool) bool{
		"before the SUBSCRIBE": func(packet mqtttest.Packet, up bool) bool { return up && packet.Type == mqtttest.Subscribe },
		"before the CONNACK":   func(packet mqtttest.Packet, up bool) bool { return !up && packet.Type == mqtttest.Connack },
	} {
		t.Run(name, func(t *testing.T) {
			before, after := startBroker(t), startBroker(t)
			proxy := mqtttest.NewProxy(t, before.Addr())
			f := openNew(t, Options{})
			subscribe(t, f, broker(proxy.URL()))
			var cut atomic.Bool
			proxy.OnPacket(func(packet mqtttest.Packet, up bool) mqtttest.Verdict {
				if gone(packet, up) && cut.CompareAndSwap(false, true) {
					return mqtttest.CutBefore
				}
				return mqtttest.Pass
			})
			subscribes := proxy.Counts().Subscribes
			proxy.SetTarget(after.Addr())
			proxy.Cut()
			mqtttest.Eventually(t, "the connection ends", cut.Load)
			counted := 1
			if name == "before the SUBSCRIBE" {
				counted = 2 // one of them did not pass
			}
			proxy.Await("a SUBSCRIBE that passes", func(c mqtttest.Counts) bool { return c.Subscribes >= subscribes+counted })
			mqtttest.Eventually(t, "the fold is connected", func() bool { return connected(f) })
			publishRecords(t, after, events(5)...)
			awaitRecords(t, f, 5)
		})
	}
}

func TestNothingIsAcknowledgedBeforeItIsCommitted(t *testing.T) {
	b := startBroker(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	var broken atomic.Bool
	var early atomic.Int64
	o := Options{}
	o.Store.BeforeStatement = func(query string) error {
		if !strings.Contains(query, "INSERT INTO record") {
			return nil
		}
		early.Add(int64(proxy.Counts().ClientPubacks))
		if broken.Load() {
			return errDiskFull
		}
		return nil
	}
	broken.Store(true)
	f := openNew(t, o)
	subscribe(t, f, broker(proxy.URL()))
	publishRecords(t, b, events(50)...)
	proxy.Await("all is delivered again and again", func(c mqtttest.Counts) bool { return c.Redelivered >= 200 && c.Connects >= 4 })
	if n := proxy.Counts().ClientPubacks; n > 0 || early.Load() > 0 {
		t.Errorf("%d PUBACKs although nothing was committed", n)
	}
	if v := verify(t, f); v.Records != 0 {
		t.Errorf("%+v", v)
	}
	broken.Store(false)
	awaitRecords(t, f, 50)
	proxy.Await("all is acknowledged", func(c mqtttest.Counts) bool { return c.ClientPubacks >= 50 })
	if v := verify(t, f); !v.OK() || v.Records != 50 {
		t.Errorf("%+v", v)
	}
}

// A fold that dies between its commit and its PUBACKs gets all of it again, and counts it once.
func TestRedeliveryAfterLostAcknowledgements(t *testing.T) {
	b := startBroker(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	var once sync.Once
	o := Options{}
	o.Store.BeforeStatement = func(query string) error {
		if strings.Contains(query, "INSERT INTO record") {
			once.Do(func() { proxy.Stall(true) })
		}
		return nil
	}
	f := openNew(t, o)
	subscribe(t, f, broker(proxy.URL()))
	publishRecords(t, b, events(50)...)
	mqtttest.Eventually(t, "a batch is committed", func() bool { return verify(t, f).Records > 0 })
	stored := verify(t, f).Records
	proxy.Cut()
	proxy.Stall(false)
	awaitRecords(t, f, 50)
	mqtttest.Eventually(t, "it came again", func() bool { return verify(t, f).Duplicates >= stored })
	if v := verify(t, f); !v.OK() || v.Records != 50 {
		t.Errorf("%+v", v)
	}
	if got := show(t, f, "r1"); !strings.HasPrefix(got, "A 50:") {
		t.Errorf("shown %q", got)
	}
}

func TestSubscriberSurvivesABrokerThatGoesAndComes(t *testing.T) {
	b := startBroker(t)
	f := openNew(t, Options{})
	subscribe(t, f, broker(b.URL()))
	list := events(200)
	for i := range 4 {
		publishRecords(t, b, list[50*i:50*i+50]...)
		b.Down()
		mqtttest.Eventually(t, "the fold has noticed", func() bool { return !connected(f) })
		if err := b.Up(); err != nil {
			t.Fatal(err)
		}
	}
	awaitRecords(t, f, 200)
	if v := verify(t, f); !v.OK() || v.Records != 200 {
		t.Errorf("%+v", v)
	}
}

func TestMalformedMessagesDoNotBlock(t *testing.T) {
	b := startBroker(t)
	proxy := mqtttest.NewProxy(t, b.Addr())
	reg := prometheus.NewRegistry()
	f := openNew(t, Options{Metrics: reg})
	subscribe(t, f, broker(proxy.URL()))
	list := events(3)
	topic := record.Topics{}.Of(&list[0])
	foreign := ev("A", 2, 1, run("r2"))
	publish(t, b, topic, list[0].AppendCloudEvent(nil), []byte("{"), nil, foreign.AppendCloudEvent(nil), []byte(`{"specversion":"1.0"}`), list[1].AppendCloudEvent(nil))
	publish(t, b, "postrider/v1/acme/events/3/odd", []byte("x"))
	publishRecords(t, b, list[2])
	awaitRecords(t, f, 3)
	proxy.Await("all is acknowledged", func(c mqtttest.Counts) bool { return c.ClientPubacks == 8 })
	if v := verify(t, f); !v.OK() || v.Records != 3 || v.Malformed != 5 {
		t.Errorf("%+v", v)
	}
	if got := metric(t, reg, "postrider_fold_malformed_total"); got != 5 {
		t.Errorf("malformed_total is %v", got)
	}
}

func TestSubscriberTakesItsPartitionsAndTenantOnly(t *testing.T) {
	b := startBroker(t)
	f := openNew(t, Options{})
	o := broker(b.URL())
	o.Tenant, o.Partitions = "acme", []int{record.Partition("acme", "r1")}
	subscribe(t, f, o)
	other := "r2"
	for i := 3; record.Partition("acme", other) == o.Partitions[0]; i++ {
		other = fmt.Sprint("r", i)
	}
	publishRecords(t, b, ev("B", 1, 0, run(other)))
	publishRecords(t, b, ev("C", 1, 0, func(r *record.Record) { r.Key.Tenant = "other" }))
	publishRecords(t, b, ev("A", 1, 0)) // the last one: what comes before it would be here
	awaitRecords(t, f, 1)
	if v := verify(t, f); v.Runs != 1 {
		t.Errorf("%+v", v)
	}
}

// syncLog collects lines; a line that contains bomb panics once.
type syncLog struct {
	mu   sync.Mutex
	b    strings.Builder
	bomb string
}

func (l *syncLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bomb != "" && strings.Contains(string(p), l.bomb) {
		l.bomb = ""
		panic("boom")
	}
	return l.b.Write(p)
}

func (l *syncLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestSubscriberSurvivesAPanic(t *testing.T) {
	b := startBroker(t)
	lines := &syncLog{bomb: "msg=subscribed"}
	f := openNew(t, Options{})
	o := broker(b.URL())
	// The handler cannot be slog's own: it holds a lock while it writes.
	o.Logger = slog.New(handler{lines})
	startSubscriber(t, f, o)
	mqtttest.Eventually(t, "a second session", func() bool { return strings.Contains(lines.String(), "msg=subscribed") })
	publishRecords(t, b, events(5)...)
	awaitRecords(t, f, 5)
	if s := lines.String(); strings.Count(s, "level=ERROR") != 1 || !strings.Contains(s, "panic: boom") {
		t.Errorf("log: %s", s)
	}
}

// handler writes lines without a lock of its own.
type handler struct{ w *syncLog }

func (h handler) Enabled(context.Context, slog.Level) bool { return true }
func (h handler) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h handler) WithGroup(string) slog.Handler            { return h }
func (h handler) Handle(_ context.Context, r slog.Record) error {
	line := fmt.Sprintf("level=%s msg=%s", r.Level, r.Message)
	r.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	_, err := h.w.Write([]byte(line + "\n"))
	return err
}

func TestSubscriberTriesOnQuietly(t *testing.T) {
	fake := mqtttest.NewFake(t)
	var tries atomic.Int64
	fake.OnConnect(func(int) int { tries.Add(1); return 5 })
	lines := &syncLog{}
	f := openNew(t, Options{})
	o := broker(fake.URL())
	o.Logger = slog.New(handler{lines})
	stop := startSubscriber(t, f, o)
	mqtttest.Eventually(t, "ten tries", func() bool { return tries.Load() >= 10 })
	stop()
	if s := lines.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "level=WARN") || !strings.Contains(s, "not authorized") {
		t.Errorf("log: %s", s)
	}
}

func TestBackoffHasFullJitterAndALimit(t *testing.T) {
	b := backoff{min: 200 * time.Millisecond, max: 30 * time.Second}
	for range 20 {
		for _, ms := range []int64{200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000} {
			if p := b.next(); p < 0 || p >= b.limit || b.limit.Milliseconds() != ms {
				t.Fatalf("pause %s of a limit of %s, want %d ms", p, b.limit, ms)
			}
		}
		b.reset()
	}
}

func TestQuietLetsOneLineAMinuteThrough(t *testing.T) {
	var q quiet
	now := time.Unix(1e9, 0)
	for i, want := range []bool{true, false, false, true} {
		if got := q.allow(now.Add(time.Duration(i) * 25 * time.Second)); got != want {
			t.Errorf("after %d s: %v", 25*i, got)
		}
	}
	q.reset()
	if !q.allow(now) {
		t.Error("quiet after reset")
	}
}

func TestSubscriberOptionsAreChecked(t *testing.T) {
	f := openNew(t, Options{})
	for _, o := range []SubscriberOptions{{Tenant: "a/b"}, {Topics: record.Topics{Root: "a/#"}}, {Partitions: []int{16}}, {Partitions: []int{}}} {
		if _, err := NewSubscriber(f, o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}
