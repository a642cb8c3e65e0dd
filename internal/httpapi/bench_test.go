package httpapi

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postrider/executor"
)

const (
	benchRounds  = 5
	benchInputs  = 8192 // of a round, over all clients
	benchClients = 64
	dataSize     = 300
)

// BenchmarkInputs compares inputs that come over HTTP with the same ones handed to executor.Submit, what the writer alone
// can do: both from as many clients at once, each for its own run, waiting for an answer before the next input, on one
// store, with an id each. The clients of HTTP are in the same process, on loopback, and cost as much as the server. The two
// take turns, and ratio is the median of the rounds' ratios, so that a disk with moods meets both.
func BenchmarkInputs(b *testing.B) {
	node := newNode(b)
	addr := take(b, Inputs{Node: node, Token: token(b, "0123456789abcdef")}, nil)
	data := `"` + strings.Repeat("x", dataSize-2) + `"`
	var next int
	round := func(client func(run string, ids []string) error) time.Duration {
		ids := make([]string, benchInputs)
		for i := range ids {
			next++
			ids[i] = fmt.Sprintf("order-%d", next)
		}
		runtime.GC()
		begin := time.Now()
		var wg sync.WaitGroup
		for i := range benchClients {
			wg.Go(func() {
				const share = benchInputs / benchClients
				if err := client(fmt.Sprintf("run-%d", i), ids[i*share:(i+1)*share]); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		return time.Since(begin)
	}
	overHTTP := func(run string, ids []string) error {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		answers := bufio.NewReader(c)
		for _, id := range ids {
			if _, err := fmt.Fprintf(c, "POST /v1/tenants/default/agents/a/runs/%s/inputs?type=order HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"+
				"Authorization: Bearer 0123456789abcdef\r\nIdempotency-Key: %s\r\nContent-Length: %d\r\n\r\n%s", run, id, len(data), data); err != nil {
				return err
			}
			resp, err := http.ReadResponse(answers, nil)
			if err != nil {
				return err
			}
			if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 202 {
				return fmt.Errorf("%s %s: %w", resp.Status, body, err)
			}
			if err := resp.Body.Close(); err != nil {
				return err
			}
		}
		return nil
	}
	bare := func(run string, ids []string) error {
		for _, id := range ids {
			in := executor.Input{Tenant: "default", Agent: "a", Run: run, ID: id, Type: "order", Data: []byte(data), Source: "http"}
			if _, err := executor.Submit(b.Context(), node.Store, in); err != nil {
				return err
			}
		}
		return nil
	}
	var httpTime, bareTime time.Duration
	var ratios []float64
	b.ReportAllocs()
	for b.Loop() { // an iteration is all rounds, whatever -benchtime says
		for range benchRounds {
			h := round(overHTTP)
			s := round(bare)
			ratios = append(ratios, s.Seconds()/h.Seconds())
			httpTime, bareTime = httpTime+h, bareTime+s
		}
	}
	slices.Sort(ratios)
	n := float64(len(ratios) * benchInputs)
	b.ReportMetric(n/httpTime.Seconds(), "inputs/s")
	b.ReportMetric(n/bareTime.Seconds(), "bare-inputs/s")
	b.ReportMetric(ratios[len(ratios)/2], "ratio")
	b.ReportMetric(0.5, "bar")
}
