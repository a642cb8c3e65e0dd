package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a server until the test ends, and gives its URL.
func start(t *testing.T, metrics prometheus.Gatherer, checks ...Check) (url string) {
	t.Helper()
	s, err := Listen("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, metrics, nil, checks...) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return "http://" + s.Addr()
}

func get(t *testing.T, method, url string) (code int, body string, header http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}

func says(name, trouble string, err error) Check {
	return Check{name, func(context.Context) (string, error) { return trouble, err }}
}

func TestReadinessIsTheWorstOfItsChecks(t *testing.T) {
	ok, degraded, failing := says("a", "", nil), says("b", `no <broker> "x"`, nil), says("c", "", errors.New("no disk"))
	for _, c := range []struct {
		checks []Check
		code   int
		want   string
	}{
		{nil, 200, `{"status":"ok","checks":[]}`},
		{[]Check{ok}, 200, `{"status":"ok","checks":[{"name":"a","status":"ok"}]}`},
		{[]Check{degraded, ok}, 200, `{"status":"degraded","checks":[{"name":"b","status":"degraded","detail":"no <broker> \"x\""},{"name":"a","status":"ok"}]}`},
		{[]Check{failing, degraded}, 503, `{"status":"failing","checks":[{"name":"c","status":"failing","detail":"no disk"},{"name":"b","status":"degraded","detail":"no <broker> \"x\""}]}`},
		{[]Check{degraded, failing}, 503, `{"status":"failing","checks":[{"name":"b","status":"degraded","detail":"no <broker> \"x\""},{"name":"c","status":"failing","detail":"no disk"}]}`},
	} {
		code, body, header := get(t, "GET", start(t, prometheus.NewRegistry(), c.checks...)+"/readyz")
		var got, want answer
		if err := errors.Join(json.Unmarshal([]byte(body), &got), json.Unmarshal([]byte(c.want), &want)); err != nil {
			t.Fatalf("%v: %s", err, body)
		}
		if code != c.code || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%d %s, not %d %s", code, body, c.code, c.want)
		}
		if header.Get("Content-Type") != "application/json" || header.Get("Cache-Control") != "no-store" {
			t.Errorf("headers %v", header)
		}
	}
}

// What was true at the start says nothing: each answer asks anew.
func TestReadinessIsAskedEachTime(t *testing.T) {
	asked := 0
	url := start(t, prometheus.NewRegistry(), Check{"a", func(context.Context) (string, error) {
		if asked++; asked == 2 {
			return "", errors.New("hangs")
		}
		return "", nil
	}})
	for _, want := range []int{200, 503, 200} {
		if code, body, _ := get(t, "GET", url+"/readyz"); code != want {
			t.Errorf("%d, not %d: %s", code, want, body)
		}
	}
	if code, _, _ := get(t, "GET", url+"/livez"); code != 200 || asked != 3 {
		t.Errorf("livez: %d after %d questions", code, asked)
	}
}

// A check that heeds nothing counts as failing, is not asked again meanwhile, and holds up neither the others nor the end.
func TestCheckThatHangsIsFailing(t *testing.T) {
	release := make(chan struct{})
	var asked atomic.Int64
	url := start(t, prometheus.NewRegistry(), says("fine", "", nil), Check{"hangs", func(context.Context) (string, error) {
		asked.Add(1)
		<-release
		return "", nil
	}}, says("fine too", "", nil))
	for range 2 {
		code, body, _ := get(t, "GET", url+"/readyz")
		var got answer
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatal(err)
		}
		want := []result{{"fine", "ok", ""}, {"hangs", "failing", "does not answer"}, {"fine too", "ok", ""}}
		if code != 503 || !slices.Equal(got.Checks, want) {
			t.Errorf("%d %s", code, body)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	close(release)
	for code := 0; code != 200; { // as soon as the hanging one has returned
		code, _, _ = get(t, "GET", url+"/readyz")
	}
}

func TestCheckIsBounded(t *testing.T) {
	url := start(t, prometheus.NewRegistry(), Check{"a", func(ctx context.Context) (string, error) {
		if _, ok := ctx.Deadline(); !ok {
			return "", errors.New("no deadline")
		}
		return "", nil
	}})
	if code, body, _ := get(t, "GET", url+"/readyz"); code != 200 {
		t.Errorf("%d %s", code, body)
	}
}

type broken struct{ desc *prometheus.Desc }

func (b broken) Describe(ch chan<- *prometheus.Desc) { ch <- b.desc }
func (b broken) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.NewInvalidMetric(b.desc, errors.New("cannot be read"))
}

// A collector that fails must not take the others along: they may say why.
func TestMetricsGoOnBesideAFailingCollector(t *testing.T) {
	reg := prometheus.NewRegistry()
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "good", Help: "It is."})
	g.Set(17)
	reg.MustRegister(g, broken{prometheus.NewDesc("bad", "It is.", nil, nil)})
	code, body, header := get(t, "GET", start(t, reg)+"/metrics")
	if code != 200 || !strings.Contains(body, "\ngood 17\n") || strings.Contains(body, "bad") {
		t.Errorf("%d %s", code, body)
	}
	if !strings.HasPrefix(header.Get("Content-Type"), "text/plain") {
		t.Errorf("content type %s", header.Get("Content-Type"))
	}
}

func TestOnlyReading(t *testing.T) {
	url := start(t, prometheus.NewRegistry())
	for _, path := range []string{"/metrics", "/livez", "/readyz"} {
		if code, _, _ := get(t, "POST", url+path); code != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: %d", path, code)
		}
		if code, body, _ := get(t, "HEAD", url+path); code != 200 || body != "" {
			t.Errorf("HEAD %s: %d %q", path, code, body)
		}
	}
	if code, body, _ := get(t, "GET", url+"/"); code != 200 || !strings.Contains(body, "/metrics") {
		t.Errorf("/: %d %q", code, body)
	}
	if code, _, _ := get(t, "GET", url+"/debug/pprof/"); code != 404 {
		t.Errorf("an unknown path: %d", code)
	}
}

func TestListenSaysWhatIsInTheWay(t *testing.T) {
	s, err := Listen(":0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !strings.HasPrefix(s.Addr(), "127.0.0.1:") {
		t.Errorf("an empty host opens %s", s.Addr())
	}
	if _, err := Listen(s.Addr(), nil); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), s.Addr()+" is taken by another program") {
		t.Errorf("taken: %v", err)
	}
	if _, err := Listen("nothing", nil); err == nil {
		t.Error("no port")
	}
}

// The end does not wait for whoever is slow to read, or to ask.
func TestEndCutsWhoIsSlow(t *testing.T) {
	s, err := Listen("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{})
	var once sync.Once
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- s.Run(ctx, prometheus.NewRegistry(), nil, Check{"slow", func(ctx context.Context) (string, error) {
			once.Do(func() { close(asked) })
			<-ctx.Done()
			return "", ctx.Err()
		}})
	}()
	quiet, err := net.Dial("tcp", s.Addr()) // says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer quiet.Close()
	waits, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer waits.Close()
	if _, err := io.WriteString(waits, "GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-asked
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the server does not end")
	}
	if _, err := net.Dial("tcp", s.Addr()); err == nil {
		t.Error("it still listens")
	}
	for _, c := range []net.Conn{quiet, waits} {
		if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a connection is still open")
		}
	}
}
