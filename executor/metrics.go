package executor

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/internal/agent"
	"postrider/internal/record"
)

type metrics struct {
	steps    *prometheus.CounterVec
	duration prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer, agents map[string]agent.Agent) *metrics {
	m := &metrics{
		steps: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "postrider_steps_total", Help: "Attempts at steps, by agent and outcome.",
		}, []string{"agent", "outcome"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "postrider_step_duration_seconds", Help: "Time of an attempt, from asking the agent to its commit.",
			Buckets: prometheus.ExponentialBuckets(0.0002, 2, 20),
		}),
	}
	for name := range agents {
		for _, outcome := range []string{"ok", "waiting", "paused", "dead", "fenced", "stopped", "error"} {
			m.steps.WithLabelValues(name, outcome)
		}
	}
	if reg != nil {
		reg.MustRegister(m.steps, m.duration)
	}
	return m
}

var (
	descRuns         = prometheus.NewDesc("postrider_runs", "Runs by status.", []string{"status"}, nil)
	descInboxPending = prometheus.NewDesc("postrider_inbox_pending", "Inputs that wait, timers among them.", nil, nil)
	descInboxDead    = prometheus.NewDesc("postrider_inbox_dead", "Dead letters of the inbox.", nil, nil)
)

// Describe implements prometheus.Collector.
func (e *Executor) Describe(ch chan<- *prometheus.Desc) {
	ch <- descRuns
	ch <- descInboxPending
	ch <- descInboxDead
}

// Collect implements prometheus.Collector: the figures are read from the database at each scrape.
func (e *Executor) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	counts := map[string]int64{"idle": 0, "ready": 0, "running": 0, "waiting": 0, "paused": 0, "done": 0, "failed": 0, "unhosted": 0}
	rows, err := e.store.Reader().QueryContext(ctx, "SELECT iif(status = 'running' AND claim_alone IS NULL, 'ready', status), count(*) FROM run WHERE name <> ? GROUP BY 1", record.NodeRun)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descRuns, err)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var status string
		var n int64
		if err := rows.Scan(&status, &n); err != nil {
			ch <- prometheus.NewInvalidMetric(descRuns, err)
			return
		}
		counts[status] = n
	}
	if err := rows.Err(); err != nil {
		ch <- prometheus.NewInvalidMetric(descRuns, err)
		return
	}
	for status, n := range counts {
		ch <- prometheus.MustNewConstMetric(descRuns, prometheus.GaugeValue, float64(n), status)
	}
	var pending, dead int64
	err = e.store.Reader().QueryRowContext(ctx, inboxCounts).Scan(&pending, &dead)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(descInboxPending, err)
		return
	}
	ch <- prometheus.MustNewConstMetric(descInboxPending, prometheus.GaugeValue, float64(pending))
	ch <- prometheus.MustNewConstMetric(descInboxDead, prometheus.GaugeValue, float64(dead))
}

// inboxCounts counts entries of indexes that hold nothing else: what is over must not make a scrape slow.
const inboxCounts = `SELECT
	(SELECT count(*) FROM inbox INDEXED BY inbox_pending WHERE consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL),
	(SELECT count(*) FROM inbox INDEXED BY inbox_dead WHERE outcome = 'dead')`
