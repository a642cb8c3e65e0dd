package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/executor"
	"postrider/fold"
	"postrider/internal/agent"
	"postrider/internal/kind"
	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

// metric is what a dashboard may ask for.
type metric struct {
	kind   string              // COUNTER, GAUGE or HISTOGRAM; "": it has no series yet
	labels []string            // without le
	values map[string][]string // of each label, that are there from the start
}

// registry also learns of metrics that have no series yet.
type registry struct {
	*prometheus.Registry
	metrics map[string]*metric
}

var descText = regexp.MustCompile(`fqName: "([^"]*)".*variableLabels: \{([^}]*)\}`)

func (r *registry) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc)
	go func() { c.Describe(descs); close(descs) }()
	for d := range descs {
		found := descText.FindStringSubmatch(d.String())
		if found == nil {
			panic(d.String())
		}
		r.metrics[found[1]] = &metric{labels: strings.FieldsFunc(found[2], func(c rune) bool { return c == ',' }), values: map[string][]string{}}
	}
	return r.Registry.Register(c)
}

func (r *registry) MustRegister(all ...prometheus.Collector) {
	for _, c := range all {
		if err := r.Register(c); err != nil {
			panic(err)
		}
	}
}

// realMetrics are those of a node, its relay and a fold.
func realMetrics(t *testing.T) map[string]*metric {
	t.Helper()
	dir := t.TempDir()
	node := &registry{prometheus.NewRegistry(), map[string]*metric{}}
	path := filepath.Join(dir, "n.db")
	store, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(schema, "n", path), sqlite.Options{Create: true, Metrics: node})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	counter, err := kind.New("go", "counter", "counter", kind.ExecOptions{})
	if err != nil {
		t.Fatal(err)
	}
	box := outbox.New(store, "n")
	node.MustRegister(box, executor.New(store, "n", map[string]agent.Agent{"counter": counter}, executor.Options{Metrics: node}))
	dial := func(context.Context) (relay.Conn, error) { panic("nobody runs this relay") }
	relay.New(box, record.Topics{}, dial, relay.Options{Metrics: node})
	relay.NewReceiver(box, &record.Inlets{}, mqtt.Options{}, nil, relay.ReceiverOptions{Metrics: node})

	other := &registry{prometheus.NewRegistry(), node.metrics} // another process
	f, err := fold.Open(t.Context(), filepath.Join(dir, "f.db"), fold.Options{Metrics: other, Store: sqlite.Options{Create: true, Metrics: other}})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	for _, r := range []*registry{node, other} {
		families, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			m := r.metrics[f.GetName()]
			m.kind = f.GetType().String()
			for _, series := range f.GetMetric() {
				for _, l := range series.GetLabel() {
					m.values[l.GetName()] = append(m.values[l.GetName()], l.GetValue())
				}
			}
		}
	}
	return node.metrics
}

type dashboard struct {
	SchemaVersion int
	Templating    struct {
		List []struct{ Name, Query string }
	}
	Panels []struct {
		ID         int
		Title      string
		Datasource struct{ UID string }
		GridPos    struct{ X, Y, W, H int }
		Targets    []struct {
			Expr       string
			Datasource struct{ UID string }
		}
	}
}

var (
	metricName  = regexp.MustCompile(`\bpostrider_\w+`)
	selector    = regexp.MustCompile(`\b(postrider_\w+)(?:\{([^}]*)\})?`)
	matcher     = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"`)
	grouping    = regexp.MustCompile(`\bby \(([^)]*)\)`)
	overTime    = regexp.MustCompile(`\b(?:rate|increase)\((postrider_\w+)`)
	ofHistogram = regexp.MustCompile(`_(?:bucket|sum|count)$`)
)

// TestDashboard: testdata/grafana/dashboard.json speaks only of metrics and labels that there are.
func TestDashboard(t *testing.T) {
	b, err := os.ReadFile("testdata/grafana/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	metrics := realMetrics(t)

	// of finds the metric that a series is of, and the labels of the series; nil: there is none.
	of := func(series string) (m *metric, labels []string) {
		if m := metrics[series]; m != nil && m.kind != "HISTOGRAM" {
			return m, m.labels
		}
		m = metrics[ofHistogram.ReplaceAllString(series, "")]
		if m == nil || m.kind != "HISTOGRAM" || !ofHistogram.MatchString(series) {
			return nil, nil
		}
		if strings.HasSuffix(series, "_bucket") {
			return m, append(slices.Clone(m.labels), "le")
		}
		return m, m.labels
	}
	check := func(t *testing.T, expr string) {
		t.Helper()
		if !metricName.MatchString(expr) {
			t.Errorf("%s: no metric of ours", expr)
		}
		may := []string{"instance", "job"} // from who scrapes
		for _, found := range selector.FindAllStringSubmatch(expr, -1) {
			m, labels := of(found[1])
			if m == nil {
				t.Errorf("%s: there is no series %s", expr, found[1])
				continue
			}
			may = append(may, labels...)
			for _, l := range matcher.FindAllStringSubmatch(found[2], -1) {
				if l[1] == "instance" || l[1] == "job" {
					continue
				}
				if !slices.Contains(labels, l[1]) {
					t.Errorf("%s: %s has no label %s", expr, found[1], l[1])
				} else if !slices.Contains(m.values[l[1]], l[2]) {
					t.Errorf("%s: label %s of %s is never %q", expr, l[1], found[1], l[2])
				}
			}
		}
		for _, by := range grouping.FindAllStringSubmatch(expr, -1) {
			for _, l := range strings.Split(by[1], ", ") {
				if !slices.Contains(may, l) {
					t.Errorf("%s: no label %s", expr, l)
				}
			}
		}
		for _, found := range overTime.FindAllStringSubmatch(expr, -1) {
			if m, _ := of(found[1]); m != nil && m.kind != "COUNTER" && m.kind != "HISTOGRAM" {
				t.Errorf("%s: %s does not count", expr, found[1])
			}
		}
	}

	if d.SchemaVersion < 39 || len(d.Panels) < 8 {
		t.Errorf("schema version %d, %d panels", d.SchemaVersion, len(d.Panels))
	}
	ids, at := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		t.Run(p.Title, func(t *testing.T) {
			if ids[p.ID] || p.ID == 0 || len(p.Targets) == 0 || p.Datasource.UID != "${datasource}" {
				t.Errorf("%+v", p)
			}
			ids[p.ID] = true
			for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
				for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
					if at[[2]int{x, y}] != "" || x >= 24 {
						t.Fatalf("it lies over %q, or beyond the border", at[[2]int{x, y}])
					}
					at[[2]int{x, y}] = p.Title
				}
			}
			for _, target := range p.Targets {
				if target.Datasource.UID != "${datasource}" {
					t.Errorf("%+v", target)
				}
				check(t, target.Expr)
			}
		})
	}
	var variables []string
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
		if v.Name != "datasource" {
			check(t, v.Query)
		}
	}
	for _, v := range regexp.MustCompile(`\$\{?(\w+)`).FindAllStringSubmatch(string(b), -1) {
		if !slices.Contains(variables, v[1]) && !strings.HasPrefix(v[1], "__") {
			t.Errorf("there is no variable %s", v[1])
		}
	}
}
