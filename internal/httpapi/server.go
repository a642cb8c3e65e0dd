// Package httpapi answers what operators and their tools ask a running process over HTTP: /metrics for Prometheus, /livez
// (the process answers) and /readyz (it does its work, as JSON). Readiness comes from checks that are made when somebody
// asks, so that it tells of progress and not of a start that went well. It is read-only and open to everybody who reaches
// its address: no secrets, no payloads.
package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server is a listener that answers once Run is called. Who connects before waits.
type Server struct {
	listener net.Listener
	log      *slog.Logger
}

// Listen takes addr (host:port; an empty host is 127.0.0.1). A nil log is quiet.
func Listen(addr string, log *slog.Logger) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	log = log.With("component", "http")
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen for HTTP on %q: %w", addr, err)
	}
	if host == "" {
		host = "127.0.0.1" // nobody means to open it to the network by leaving something out
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("listen for HTTP: %s is taken by another program: %w", net.JoinHostPort(host, port), syscall.EADDRINUSE)
	}
	if err != nil {
		return nil, fmt.Errorf("listen for HTTP: %w", err)
	}
	s := &Server{listener: l, log: log}
	if ip := net.ParseIP(host); host != "localhost" && !ip.IsLoopback() {
		log.Warn("metrics and health are open to the network", "addr", s.Addr())
	}
	return s, nil
}

// Addr is host:port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close ends a server that never ran.
func (s *Server) Close() error { return s.listener.Close() }

// Run answers until ctx ends, and then returns nil. It returns soon: whoever is still being answered is cut after a second.
func (s *Server) Run(ctx context.Context, metrics prometheus.Gatherer, checks ...Check) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError, // a database that cannot be read must not hide why
		MaxRequestsInFlight: 4,
		Timeout:             10 * time.Second,
	}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { text(w, "ok\n") })
	var asking sync.WaitGroup
	inquirers := make([]*inquirer, len(checks))
	for i, c := range checks {
		inquirers[i] = &inquirer{Check: c, asking: &asking}
	}
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { ready(ctx, w, inquirers) })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { text(w, "/metrics\n/livez\n/readyz\n") })
	server := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      20 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // mostly what strangers send
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(s.listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP on %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(last); err != nil {
		_ = server.Close() // cuts them; there is nobody to tell
	}
	asked := make(chan struct{})
	go func() { asking.Wait(); close(asked) }()
	select {
	case <-asked:
	case <-last.Done(): // a check that heeds nothing is left to itself; the process ends
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", s.Addr(), err)
	}
	return nil
}

func text(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = io.WriteString(w, body)
}
