package thompson

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func drawVector(t *rapid.T, what string) (x banditVector) {
	for i := range x {
		x[i] = rapid.Float64Range(-1, 1).Draw(t, what)
	}
	return x
}

func TestLinearBanditSamplesAroundItsMean(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prior := &banditPrior{lambda: rapid.Float64Range(0.1, 10).Draw(t, "lambda"), theta: drawVector(t, "theta")}
		l := newLinearBandit(prior)
		for range rapid.IntRange(0, 30).Draw(t, "rewards") {
			x := drawVector(t, "x")
			l.forget(rapid.Float64Range(0, 1).Draw(t, "keep"), prior)
			l.learn(&x, rapid.Float64Range(0, 1).Draw(t, "reward"))
		}
		x := drawVector(t, "asked")
		var none, weights banditVector
		for i := range weights {
			var along banditVector
			along[i] = 1
			weights[i] = l.sample(&along, &none, 1)
		}
		for i := range weights { // they solve A·weights = b
			row := banditVector{}
			for j := range row {
				row[j] = l.a[min(i, j)*banditDim+max(i, j)]
			}
			if got := dot(&row, &weights); math.Abs(got-l.b[i]) > 1e-6*max(1, math.Abs(l.b[i])) {
				t.Fatalf("row %d of A times the mean weights is %v, want %v", i, got, l.b[i])
			}
		}
		want := dot(&weights, &x)
		if got := l.sample(&x, &none, 1); math.Abs(got-want) > 1e-6*max(1, math.Abs(want)) {
			t.Fatalf("mean %v, want %v", got, want)
		}
		z := drawVector(t, "z")
		for i := range none {
			none[i] = -z[i]
		}
		if a, b := l.sample(&x, &z, 0.5), l.sample(&x, &none, 0.5); math.Abs((a+b)/2-want) > 1e-6*max(1, math.Abs(want)) {
			t.Fatalf("%v and %v are not around %v", a, b, want)
		}
		l.forget(0, prior)
		if got := l.sample(&x, &banditVector{}, 1); math.Abs(got-dot(&x, &prior.theta)) > 1e-6 {
			t.Fatalf("forgotten, it expects %v, not what it did at first", got)
		}
	})
}

func TestLinearBanditsSpreadIsThatOfItsCovariance(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	l := newLinearBandit(&banditPrior{lambda: 2})
	x := banditVector{1, 0.5, 0.2, 0, 0.3, 0.6, 0.1, 0.9, 0.4}
	for range 5 {
		l.learn(&x, 1)
	}
	const draws, v = 100_000, 0.25
	sum, squares := 0.0, 0.0
	for range draws {
		var z banditVector
		for i := range z {
			z[i] = random.NormFloat64()
		}
		s := l.sample(&x, &z, v)
		sum, squares = sum+s, squares+s*s
	}
	xx := dot(&x, &x)
	mean, variance := sum/draws, squares/draws-sum/draws*sum/draws
	if want := 5 * xx / (2 + 5*xx); math.Abs(mean-want) > 0.002 {
		t.Errorf("mean %v, want %v", mean, want)
	}
	if want := v * v * xx / (2 + 5*xx); math.Abs(variance/want-1) > 0.02 { // of v²·xᵀA⁻¹x
		t.Errorf("variance %v, want %v", variance, want)
	}
}

func TestLinearBanditCopesWithMatricesThatHaveNoFactors(t *testing.T) {
	l := newLinearBandit(&banditPrior{lambda: 1, theta: banditVector{0.5}})
	l.a[0], l.a[banditDim+1] = -1, 1e-7 // the latter is helped by jitter
	x, z := banditVector{0, 0, 1}, banditVector{1, 1, 1, 1, 1, 1, 1, 1, 1}
	if s := l.sample(&x, &z, 0.25); l.eigen == nil || math.Abs(math.Abs(s)-0.25) > 1e-9 {
		t.Errorf("sample %v", s)
	}
	l.a[0], l.factored = math.NaN(), false
	if s := l.sample(&x, &z, 0.25); !math.IsNaN(s) {
		t.Errorf("of nothing sensible it samples %v", s)
	}
	p := mustPolicy(t, "none")
	if s := p.score(&requestTerms{}, &candidate{loadFactor: 1}, math.NaN(), 0.5); s != -1e9 {
		t.Errorf("which scores %v", s)
	}
}

func TestSoftmaxIsDefinedForAnyScores(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scores := rapid.SliceOfN(rapid.SampledFrom([]float64{-1e9, -3, -0.1, 0, 0.1, 700, 1e300, math.Inf(1), math.NaN()}), 1, 9).Draw(t, "scores")
		chances := softmaxOf(nil, scores, rapid.SampledFrom([]float64{0, 0.05, 1, 2}).Draw(t, "temperature"))
		sum := 0.0
		for _, c := range chances {
			sum += c
		}
		if math.Abs(sum-1) > 1e-9 {
			t.Fatalf("chances %v", chances)
		}
		if i := drawFrom(chances, rapid.Float64Range(0, 1).Draw(t, "draw")); i < 0 || i >= len(scores) {
			t.Fatalf("drawn %d", i)
		}
	})
}

func TestEigenvectorsSolveTheirMatrix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var a banditMatrix
		for i := range banditDim {
			for j := i; j < banditDim; j++ {
				a[i*banditDim+j] = rapid.SampledFrom([]float64{-3, -1e-6, 0, 1, 1e3}).Draw(t, "a") * rapid.Float64Range(0.1, 1).Draw(t, "of it")
			}
			a[i*banditDim+i] = rapid.Float64Range(1e4, 1e5).Draw(t, "diagonal") // so that no eigenvalue is raised
		}
		e := newBanditEigen(&a)
		for k, value := range e.values {
			for l := range e.vectors {
				want := 0.0
				if k == l {
					want = 1
				}
				if got := dot(&e.vectors[k], &e.vectors[l]); math.Abs(got-want) > 1e-12 {
					t.Fatalf("vectors %d and %d: %v, want %v", k, l, got, want)
				}
			}
			for i := range banditDim {
				sum := 0.0
				for j := range banditDim {
					sum += a[min(i, j)*banditDim+max(i, j)] * e.vectors[k][j]
				}
				if want := value * e.vectors[k][i]; math.Abs(sum-want) > 1e-8*math.Abs(value) {
					t.Fatalf("row %d of A times vector %d is %v, want %v", i, k, sum, want)
				}
			}
		}
	})
}

// TestMeansAreDrawnFromBetaDistributions compares draws with moments and, where it has a simple
// form, with the distribution function.
func TestMeansAreDrawnFromBetaDistributions(t *testing.T) {
	random := randomDraws{rand.New(rand.NewPCG(1, 2))}
	const n = 200_000
	for _, one := range []struct {
		alpha, beta float64
		below       func(x float64) float64 // nil: moments only
	}{
		{1, 1, func(x float64) float64 { return x }},
		{3.5, 1, func(x float64) float64 { return math.Pow(x, 3.5) }},
		{1, 8, func(x float64) float64 { return 1 - math.Pow(1-x, 8) }},
		{0.5, 0.5, func(x float64) float64 { return 2 / math.Pi * math.Asin(math.Sqrt(x)) }},
		{2, 2, func(x float64) float64 { return x * x * (3 - 2*x) }},
		{0.2, 3, nil},
		{30, 70, nil},
		{1e5, 2, nil},
	} {
		sum, squares, drawn := 0.0, 0.0, make([]float64, n)
		for i := range drawn {
			drawn[i] = betaBandit{one.alpha, one.beta}.sample(random)
			sum, squares = sum+drawn[i], squares+drawn[i]*drawn[i]
		}
		all := one.alpha + one.beta
		mean, variance := one.alpha/all, one.alpha*one.beta/(all*all*(all+1))
		if got := sum / n; math.Abs(got-mean) > 5*math.Sqrt(variance/n) {
			t.Errorf("beta(%v, %v): mean %v, want %v", one.alpha, one.beta, got, mean)
		}
		if got := squares/n - sum/n*sum/n; math.Abs(got/variance-1) > 0.03 {
			t.Errorf("beta(%v, %v): variance %v, want %v", one.alpha, one.beta, got, variance)
		}
		if one.below == nil {
			continue
		}
		slices.Sort(drawn)
		far := 0.0
		for i, x := range drawn {
			far = max(far, math.Abs(one.below(x)-float64(i)/n))
		}
		if far > 2/math.Sqrt(n) { // Kolmogorov and Smirnov: once in 1,500
			t.Errorf("beta(%v, %v): the distribution is off by %v", one.alpha, one.beta, far)
		}
	}
}
