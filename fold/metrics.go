package fold

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	records, duplicates, conflicts, malformed prometheus.Counter
	connected                                 prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "postrider_fold_" + name, Help: help})
	}
	m := &metrics{
		records:    counter("records_total", "Records stored under keys that were new."),
		duplicates: counter("duplicates_total", "Redeliveries that changed nothing."),
		conflicts:  counter("conflicts_total", "Records that came with other content under a key that was taken."),
		malformed:  counter("malformed_total", "Messages on events topics that were no event of theirs."),
		connected:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "postrider_fold_connected", Help: "1 while the fold is subscribed at the broker."}),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.records, m.duplicates, m.conflicts, m.malformed, m.connected} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) count(r Result) {
	m.records.Add(float64(r.Stored))
	m.duplicates.Add(float64(r.Duplicates))
	m.conflicts.Add(float64(r.Conflicts))
	m.malformed.Add(float64(r.Malformed))
}
